"""metrics.jsonl: one line per optimizer step, one per measurement in between, one per phase in closed form."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from acm_compiler.errors import StorageError
from acm_compiler.files import remedy
from acm_compiler.training.state import what_remains


class Journal:
    """Appends lines to a file; every line is complete when `write` returns. Without a path it keeps nothing.

    `keep_bytes`: how much of an earlier run's file stays; what was written after its last saved state is cut off.
    """

    def __init__(self, path: Path | None, *, keep_bytes: int = 0) -> None:
        self.path = path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab")
            self.file.truncate(keep_bytes)
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, line: dict[str, Any]) -> None:
        """Add one line. StorageError when the disk does not take it."""
        if self.path is None:
            return
        plain = {name: _plain(value) for name, value in line.items()}
        try:
            self.file.write(json.dumps(plain).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return 0 if self.path is None else self.file.tell()

    def close(self) -> None:
        """Let go of the file."""
        if self.path is not None:
            self.file.close()


def _plain(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        "metrics cannot be written",
        where=str(path),
        found=error.strerror or error,
        fix=f"{remedy(error)}; {what_remains(path.parent)}",
    )
