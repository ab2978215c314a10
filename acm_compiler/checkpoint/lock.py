"""One process at a time in a folder: a lock whose file names the process that holds it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from acm_compiler.errors import UsageError
from acm_compiler.files import parse_json, storing

LOCK = ".lock"
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
