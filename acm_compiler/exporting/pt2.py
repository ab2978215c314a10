"""Format pt2: a torch.export program."""

from __future__ import annotations

from pathlib import Path

import torch

from acm_compiler.exporting.traced import Traced

FILE = "program.pt2"


def usage(traced: Traced) -> str:
    """Python code that loads and calls the program; the import of this package registers its operators."""
    first = "import torch" if traced.low is None else "import torch, acm_compiler.acm"
    return f'{first}; model = torch.export.load("{FILE}").module(); model({", ".join(traced.words)})'


def write(traced: Traced, path: Path) -> None:
    """Write the program to the file `path`."""
    torch.export.save(traced.program, path)
