"""Bytes that each process holds while ViT-B/16 is trained: torchrun --nproc-per-node 4 -m benchmarks.sharded_memory

One step of AdamW on one image, with all sites converted and random weights; tensors are counted, not the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchvision.models import vit_b_16

import acm_compiler as acm
from acm_compiler.runtime import ranks
from acm_compiler.training.machine import open_machine
from acm_compiler.training.sharding import shard


def megabytes(tensors: Iterable[Tensor]) -> float:
    """Size of tensors, or of this process's parts of them."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors) / 1e6


def main() -> None:
    """Train one step, and print the largest of all processes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = open_machine(sharded=True)
    model, x = vit_b_16().eval(), torch.randn(1, 3, 224, 224)
    model = acm.rewrite(model, acm.plan(model, x, sites=[{"match": ["mlp", "attn"], "init": "random"}]), inplace=True)
    frozen = [site.dense for site in acm.sites(model).values()]
    nn.ModuleList(frozen).requires_grad_(False)
    if machine.sharded:
        shard(model, machine)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    acm.relax(model.train(), 0.8)
    (model(x).square().mean() + sum(acm.losses(model, 0.5).values())).backward()
    gradients = megabytes(p.grad for p in trained if p.grad is not None)
    optimizer.step()
    moments = megabytes(t for state in optimizer.state.values() for key, t in state.items() if key != "step")
    every = ranks.gathered((megabytes(model.parameters()), megabytes(trained), gradients, moments))
    if machine.is_main:
        names = ("parameters, dense regions included", "of them trained", "gradients", "AdamW's moments")
        print(f"{machine.world} processes, MB on the fullest:")
        for name, values in zip(names, zip(*every, strict=True), strict=True):
            print(f"  {name}: {max(values):.0f}")


if __name__ == "__main__":
    main()
