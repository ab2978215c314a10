"""Writing each stage's result as text, for whoever has to find out what the compiler saw and decided."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from acm_compiler import env
from acm_compiler.errors import StorageError
from acm_compiler.files import write_file

_ROOMS = {"capture": "passes", "sites": "passes", "rewrite": "passes", "plan": "planner"}


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
