"""Several processes of one helper module, by torchrun or another launcher, and what each of them wrote."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tests.helpers import ROOT


def torchrun(processes: int = 2) -> tuple[str, ...]:
    """The start of a command that runs so many processes on this machine; a port comes next."""
    return ("torch.distributed.run", "--nproc-per-node", str(processes), "--master-port")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(
    module: str, directory: Path, *arguments: str, launcher: Sequence[str] = (), processes: int = 2
) -> list[dict[str, Tensor]]:
    """The tensors that each process of the module left in DIRECTORY/rankN.safetensors; see `run_all`."""
    run_all(module, str(directory), *arguments, launcher=launcher, processes=processes)
    return [load_file(directory / f"rank{rank}.safetensors") for rank in range(processes)]


def run_all(module: str, *arguments: str, launcher: Sequence[str] = (), processes: int = 2) -> None:
    """Run the module to its end; launcher: the start of another command than torchrun's, up to the port."""
    start = [sys.executable, "-m", *(launcher or torchrun(processes)), str(free_port())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*start, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "reducer.cpp" not in done.stderr, done.stderr  # where DDP warns
