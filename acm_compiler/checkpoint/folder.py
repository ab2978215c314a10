"""The folder of a saved model: which files are ours, and how new ones get in without ever being seen half-written.

One process at a time works in it: a lock, whose file names the process that holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from acm_compiler.errors import AcmError, StorageError, UsageError, a_few_of
from acm_compiler.files import check_room, folder_at, is_part, parse_json, storing
from acm_compiler.sources.from_hf import PROCESSOR_FILES

PLAN, WEIGHTS, MODEL, BUDGETS = "plan.json", "model.safetensors", "model.json", "budgets.json"
# written last: it names the other files of the same save
_ORDER = (WEIGHTS, PLAN, BUDGETS, MODEL)
_ASIDE = ".saving"
# what a comparison leaves: results, table, charts, and each method's scores
COMPARED = ("compare.json", "compare.txt", "compare.png", "compare.svg", "compare")
_OTHER_DATA = re.compile(r"eval-\w+-[0-9a-f]{8}\.json")  # evaluations on other data than the run's own
_OF_RUNS = ("recipe.yaml", "metrics.jsonl", "eval.json", "bench.json", "report", "state", "export")
LOCK = ".lock"
# the weights in several files, and the list of them that other libraries read
INDEX = f"{WEIGHTS}.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_OURS = frozenset([*_ORDER, *_OF_RUNS, *COMPARED, _ASIDE, LOCK])
Writer = Callable[[Path], None]


def check_own_folder(directory: str | os.PathLike[str]) -> None:
    """Raise StorageError unless a model can be saved at `directory`: a new folder, an empty one, or one of ours.

    Nothing is created.
    """
    folder = folder_at(directory)
    known = _known(folder)
    refuse_others(folder, lambda name: name in known or _is_ours(name), "the folder holds files that are not ours")
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    with storing(folder), tempfile.TemporaryFile(dir=nearest):
        pass


def refuse_others(folder: Path, is_own: Callable[[str], bool], what: str, kind: type[AcmError] = StorageError) -> None:
    """Raise `kind`, with the words `what`, where a folder holds files that are not its own; also where it is a file."""
    fix = "choose an empty or new folder"
    if folder.exists() and not folder.is_dir():
        raise kind("this is a file, not a folder", where=str(folder), fix=fix)
    found = [path.name for path in folder.iterdir()] if folder.exists() else []
    if others := sorted(name for name in found if not is_own(name) and not is_part(name)):
        raise kind(what, where=str(folder), found=a_few_of(others), fix=fix)


def holds_model(directory: str | os.PathLike[str]) -> bool:
    """True if a save has left weights, or their description, in `directory`."""
    return any((Path(directory) / name).exists() for name in (MODEL, WEIGHTS, INDEX))


def _is_weights(name: str) -> bool:
    """True for a file of a saved model's weights, or the list of these."""
    return name in (WEIGHTS, INDEX) or _SHARD.fullmatch(name) is not None


def _is_ours(name: str) -> bool:
    return _is_weights(name) or _OTHER_DATA.fullmatch(name) is not None


def save_id(directory: str | os.PathLike[str]) -> str | None:
    """Identifier of the save in `directory`, unlike every other's; None where there is none that can be read."""
    found = _described(Path(directory), "save")
    return found if isinstance(found, str) else None


def _known(folder: Path) -> frozenset[str]:
    """The names of ours that may be in `folder`: those of every run, and what its last save added."""
    listed = _described(folder, "files")
    if not isinstance(listed, list):
        return _OURS
    return _OURS.union(PROCESSOR_FILES, (name for name in listed if isinstance(name, str)))


def _described(folder: Path, key: str) -> object:
    """An entry of the folder's model.json, None where there is none."""
    try:
        return parse_json((folder / MODEL).read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checked_extra(extra: Mapping[str, bytes | str] | None) -> dict[str, bytes | str]:
    """The extra files by name; UsageError where they are none, or their names are taken or lead out of the folder."""
    if extra is not None and not isinstance(extra, Mapping):
        expected = "such as {'notes.txt': 'text or bytes'}"
        raise UsageError("extra must be a mapping of files", found=type(extra).__name__, expected=expected)
    for name, content in (extra or {}).items():
        if not isinstance(content, (bytes, str)):
            raise UsageError(
                "an extra file must be text or bytes",
                where=repr(name),
                found=type(content).__name__,
                fix="json.dumps(...) makes text of plain objects",
            )
        if (
            not isinstance(name, str)
            or name in _ORDER
            or _is_weights(name)
            or name in ("", ".", "..")
            or Path(name).name != name
        ):
            raise UsageError(
                "an extra file of a saved model cannot have this name", found=repr(name), expected="a plain new name"
            )
    return dict(extra or {})


def write_folder(
    directory: str | os.PathLike[str], writers: Mapping[str, Writer], *, size_bytes: int, among_others: bool = False
) -> None:
    """Write files into `directory`, all or none: each first into a sibling folder, then renamed.

    `writers` writes each file, whole, at the path it is given, in their order, so that a later one can read an earlier
    one's; `size_bytes` is about what they need together. Other files of ours in the folder stay; those of others are
    refused but for `among_others`. StorageError when it cannot be written, UsageError while another process works
    there; what was there before is then untouched.
    """
    if not among_others:
        check_own_folder(directory)
    folder = folder_at(directory).resolve()
    # a mounted folder cannot be renamed, nor files into it from outside
    aside = folder / _ASIDE if folder.is_mount() else folder.with_name(f".{folder.name}{_ASIDE}")
    refuse_taken(folder)
    with storing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_room(folder.parent, size_bytes, instead="choose a folder on another disk")
        _clear(aside)
        aside.mkdir()
        try:
            for name, write in writers.items():
                write(aside / name)
            _move(aside, folder, [*(set(writers) - set(_ORDER)), *(name for name in _ORDER if name in writers)])
            for old in folder.iterdir():
                if _is_weights(old.name) and old.name not in writers:
                    old.unlink()
        finally:
            _clear(aside)


def _move(aside: Path, folder: Path, names: list[str]) -> None:
    if aside.parent != folder and (not folder.exists() or not any(folder.iterdir())):
        aside.rename(folder)
        return
    for name in names:
        (aside / name).replace(folder / name)


def _clear(aside: Path) -> None:
    if aside.exists():
        shutil.rmtree(aside)


# helpers of a killed process, such as those that load data, keep its lock until they notice
_ORPHANS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a lock, and since when."""

    pid: int
    host: str
    since: str

    @classmethod
    def this(cls) -> Holder:
        """This process, from now on."""
        return cls(pid=os.getpid(), host=socket.gethostname(), since=datetime.now().isoformat(" ", "seconds"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_here(self) -> bool:
        """True if it is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_dead(self) -> bool:
        """True if it is known to have ended, which it never is of processes on other machines."""
        if not self.is_here:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            return False
        return False


@contextlib.contextmanager
def locked(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Be the only process that works in `folder`, which is made if it is not there; nothing is left of the lock.

    UsageError, naming the other, while another process holds the lock. `tell` is given a sentence on a lock that a
    process left behind: the system frees it when the process ends.
    """
    path, made = folder / LOCK, not folder.exists()
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        before = _holder(path)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=_ORPHANS_S if before is not None and before.is_dead else 0)
        except Timeout:
            raise _taken(folder, _holder(path)) from None
    try:
        if before is not None:
            tell(_left_behind(before))
        with storing(folder):
            path.write_text(json.dumps(asdict(Holder.this())))  # in place: another file would be another lock
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        if made and not any(folder.iterdir()):
            folder.rmdir()


def refuse_taken(folder: Path) -> None:
    """UsageError, naming it, while another process holds the lock of `folder`."""
    holder = _holder(folder / LOCK)
    if holder is None or (holder.pid == os.getpid() and holder.is_here):
        return
    with storing(folder):
        try:
            FileLock(folder / LOCK).acquire(timeout=0).lock.release()
        except Timeout:
            raise _taken(folder, holder) from None


def _holder(path: Path) -> Holder | None:
    """The process that the lock's file names; None where there is no such file, or it names none yet."""
    try:
        facts = parse_json(path.read_text())
        return Holder(pid=int(facts["pid"]), host=str(facts["host"]), since=str(facts["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _taken(folder: Path, holder: Holder | None) -> UsageError:
    return UsageError(
        "another process is at work in this folder",
        where=str(folder),
        found=holder or "a lock that names no process yet",
        fix="wait until it ends, stop it, or choose another folder by --out",
    )


def _left_behind(holder: Holder) -> str:
    if holder.is_here:
        return f"took over the lock of a run that was killed: {holder}"
    return (
        f"took over the lock of a run on another machine, whose file system says that it is free: {holder}. "
        f"Make sure that it has ended: a few network file systems do not share locks"
    )
