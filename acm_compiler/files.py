"""Files: written whole or not at all, JSON that is refused as a ValueError however it is broken, and `ACM_DUMP`."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from acm_compiler import env
from acm_compiler.errors import StorageError, UsageError

_PART = ".part"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to: at the end it takes the place of `path`, and after an error nothing does.

    The file is on the disk then, with the permissions of the one it replaces, or those of the user's new files. What
    is no ordinary file, such as a pipe, is written to directly.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    target = Path(os.path.realpath(target))  # a link stays a link
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}{_PART}")
    try:
        beside.touch(exist_ok=False)
        mode = (target if target.exists() else beside).stat().st_mode
        yield beside
        beside.chmod(mode)  # safetensors makes files that nobody but their owner can read
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def folder_at(directory: str | os.PathLike[str]) -> Path:
    """The path that `directory` is; UsageError for what is none."""
    try:
        return Path(directory)
    except TypeError:
        found = type(directory).__name__
        raise UsageError("a folder must be a path, as text or pathlib.Path", found=found) from None


def is_part(name: str) -> bool:
    """True if a file of this name is what a killed process had not finished writing."""
    return name.startswith(".") and name.endswith(_PART)


def write_file(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file whole or not at all. StorageError when it cannot be written; what was there is then untouched."""
    with storing(path, "the file cannot be written"), whole_file(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def storing(where: str | os.PathLike[str], what: str = "the folder cannot be written") -> Iterator[None]:
    """Turns what the system or the weights' format refuses into a StorageError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise StorageError(what, where=os.fspath(where), found=found, fix=remedy(error)) from error


def remedy(error: BaseException) -> str:
    """Remedy for a write that failed: room is only asked for where it is missing, or where nothing is known."""
    number = getattr(error, "errno", None)
    if number in _NO_PLACE:
        return "choose a folder that exists and that you may write to"
    if number in _NO_ROOM or number is None:
        return "make room, or choose a folder on another disk"
    return "check the disk, or choose a folder on another one"


def check_room(folder: Path, size_bytes: int, what: str = "the disk has too little room", *, instead: str) -> None:
    """StorageError, which begins with `what`, where less is free; `instead`: what else helps than to make room."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        found, expected = f"{size_text(free)} free", f"about {size_text(size_bytes)}"
        raise StorageError(what, where=str(folder), found=found, expected=expected, fix=f"make room, or {instead}")


def size_text(count: int) -> str:
    """A number of bytes in a unit that shows it: `812 bytes`, `41.5 kB`, `1.2 GB`."""
    if count < 1000:
        return f"{count} bytes"
    unit = next((unit for unit in ((1e3, "kB"), (1e6, "MB"), (1e9, "GB")) if count < 999.5 * unit[0]), (1e12, "TB"))
    return f"{count / unit[0]:.3g} {unit[1]}"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", re.IGNORECASE)


def bytes_of(size: int | str, what: str) -> int:
    """The number of bytes that `size` is, such as 5_000_000 or "5GB" ("5GiB" in powers of 1024); UsageError for others.

    `what` says what it is for.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    count = 0
    if found is not None:
        number, unit, binary = found.groups()
        count = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if not count:
        raise UsageError(f"{what} must be a size", found=repr(size), expected="a number of bytes, or text like '5GB'")
    return count


def read_result(path: Path, what: str, *, fix: str) -> str | None:
    """The text of `path`, None where there is no such file. StorageError, which begins with `what`, where it is odd."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(what, where=str(path), found=error, fix=fix) from None


def parse_json(text: str | bytes) -> Any:
    """The document that `text` is; ValueError for what is no JSON or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


_ROOMS = {"capture": "passes.capture", "sites": "passes.survey", "plan": "planning", "rewrite": "passes.rewrite"}


def dump(name: str, text: Callable[[], str]) -> None:
    """Write `text()` to the file `name` of the dump directory; nothing at all when there is none."""
    directory = env.dump_directory()
    if directory is None:
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_file(Path(directory) / name, text())
    except (OSError, StorageError) as error:
        raise StorageError("no dump can be written", where=directory, found=error, fix=f"unset {env.DUMP}") from None


def show_logs() -> None:
    """Send the log of the rooms named in ACM_LOG to standard error."""
    rooms = env.logged_rooms()
    if not rooms:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    for room in rooms:
        name = "acm_compiler" if room == "all" else f"acm_compiler.{_ROOMS.get(room, room)}"
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
