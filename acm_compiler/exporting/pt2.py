"""Format pt2: a torch.export program."""

from __future__ import annotations

from pathlib import Path

import torch

FILE = "program.pt2"


def write(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write `program` to the file `path`, without the paths of the code that it was made of."""
    torch.export.save(program, path)
