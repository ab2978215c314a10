"""Calibrate a model whose weights take twice the memory that is left; run by test_offload, or by hand.

    python -m tests.helpers.calibrate_in_little_memory offload|memory FOLDER BLOCKS WIDTH [unlimited]

The model is opened from a checkpoint in shards, whose files are mapped for both; `offload` puts what is new into files,
`memory` does not. The limit is one on what is allocated (RLIMIT_DATA): pages of files that the system can drop are not
counted. Prints a digest of learners and budget table, and how far resident anonymous memory grew.
"""

from __future__ import annotations

import hashlib
import re
import resource
import sys
import threading
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.passes.rewrite.conversion import conversion, sites

BATCHES, ROWS, LENGTH, TOKENS = 24, 1, 64, 1_280
SHARD = 10  # tensors


class Deep(nn.Module):
    """[B, S, width] -> the same: MLPs without biases, each beside a bypass."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            first, last = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.blocks.append(nn.Sequential(first, nn.GELU(), last))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def opened(folder: Path, blocks: int, width: int) -> nn.Module:
    """The model with weights in the files of a checkpoint, which is written a shard at a time."""
    with torch.device("meta"):
        model = Deep(blocks, width)
    weights: dict[str, Tensor] = {}
    names = list(model.state_dict())
    for first in range(0, len(names), SHARD):
        shard, part = folder / f"{first}.safetensors", names[first : first + SHARD]
        save_file({name: torch.randn(width, width) / width**0.5 for name in part}, shard)
        weights |= load_file(shard)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def status(name: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


class Watch(threading.Thread):
    """The largest resident anonymous memory seen, looked at every 5 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self.most = max(self.most, status("RssAnon"))


def main(where: str, folder: Path, blocks: int, width: int, limited: bool) -> None:
    """Convert and calibrate; MemoryError or RuntimeError where memory does not suffice."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, size_bytes = opened(folder, blocks, width), blocks * 2 * width**2 * 4
    batches = [torch.randn(ROWS, LENGTH, width) for _ in range(BATCHES)]
    plan = acm.plan(model, batches[0], sites="mlp")
    watch = Watch()
    watch.start()
    torch.zeros(1, requires_grad=True).sum().backward()  # starts threads, whose stacks count as allocated: 64 MiB
    before, resident = status("VmData"), status("RssAnon")  # libraries are loaded by now
    if limited:
        limit = before + size_bytes // 2
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    offload = folder if where == "offload" else None
    acm.rewrite(model, plan, inplace=True, offload=offload)
    options = Options(tokens=TOKENS, gate_steps=10, sample=512, backward_passes=1, offload=offload)
    calibrate_on(model, masked(batches), options=options)
    watch.ended.set()
    digest = hashlib.sha256(repr(conversion(model).table).encode())
    for site in sites(model).values():
        for parameter in site.parameters():
            digest.update(parameter.detach().numpy().data)
    sys.stdout.write(
        f"{digest.hexdigest()[:16]}; weights {size_bytes >> 20} MiB; resident anonymous memory grew by "
        f"{(watch.most - resident) >> 20} MiB, allocated by {(status('VmData') - before) >> 20} MiB at the end\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5]), limited="unlimited" not in sys.argv)
