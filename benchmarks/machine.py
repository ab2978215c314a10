"""The machine and the versions that a benchmark ran with."""

from __future__ import annotations

import os
import platform

import torch

from acm_compiler.evaluation.bench import clock


def machine() -> str:
    """Versions, threads and load, which belong to every table of times."""
    versions = f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads,"
    return f"{versions}\n{torch.backends.cpu.get_cpu_capability()}, {clock()[0]}, load {os.getloadavg()[0]:.1f}\n"
