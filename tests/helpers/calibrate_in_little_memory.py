"""Calibrate a model of 80 blocks where its weights take twice the memory that is left; run by test_offload, or by hand.

    python -m tests.helpers.calibrate_in_little_memory offload|memory FOLDER [unlimited]

`offload` converts it with what is new in files, `memory` without; its own weights are in files for both. Prints a
digest of the learners and of the budget table.
"""

from __future__ import annotations

import hashlib
import re
import resource
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.passes.rewrite.offload import kept, offloading

BLOCKS, WIDTH = 80, 1024
SIZE_BYTES = BLOCKS * 2 * WIDTH**2 * 4


class Deep(nn.Module):
    """[B, S, 1024] -> [B, S, 1024]: MLPs without biases, each beside a bypass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(BLOCKS):
            first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
            self.blocks.append(kept(nn.Sequential(first, nn.GELU(), last)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def status(name: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main(where: str, folder: Path, limited: bool) -> None:
    """Convert and calibrate; MemoryError or RuntimeError where memory does not suffice."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with offloading(folder):
        model = Deep().eval()
    batches = [torch.randn(2, 64, WIDTH) for _ in range(24)]
    plan = acm.plan(model, batches[0], sites="mlp")
    before = status("VmData")  # libraries are loaded by now
    sys.stdout.write(f"weights {SIZE_BYTES >> 20} MiB; allocated before the conversion {before >> 20} MiB\n")
    if limited:
        limit = before + SIZE_BYTES // 2
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    offload = folder if where == "offload" else None
    acm.rewrite(model, plan, inplace=True, offload=offload)
    options = Options(tokens=2_500, gate_steps=10, sample=512, projections=1, offload=offload)
    calibrate_on(model, masked(batches), options=options)
    digest = hashlib.sha256(repr(conversion(model).table).encode())
    for site in sites(model).values():
        for parameter in site.parameters():
            digest.update(parameter.detach().numpy().data)
    peak = f"largest resident size {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"
    sys.stdout.write(f"{digest.hexdigest()[:16]}; allocated at the end {status('VmData') >> 20} MiB; {peak}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), limited="unlimited" not in sys.argv)
