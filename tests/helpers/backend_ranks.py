"""One process of a compiled data-parallel run: `python -m tests.helpers.backend_ranks DIR RANK`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.build import Stack, planned_site, stack_of

RANKS = 2


def make_model() -> Stack:
    """Every process's model; each token runs 3 of 4 learners, and only learners are trained."""
    torch.manual_seed(0)
    model = stack_of(planned_site("a", k_min=1), planned_site("b"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".learners." in name)
    for site in model.acms:
        site.set_choices(knob=0.0, k_lo=3, k_hi=3)
    return model


def examples() -> Tensor:
    """The whole batch, of which every process takes an equal part."""
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the mean square of the answers, by parameter."""
    model(x).square().mean().backward()
    return {name.split("module.")[-1]: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main(directory: Path, rank: int) -> None:
    """Keep this process's gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    compiled = torch.compile(DistributedDataParallel(make_model()), backend="acm")
    found = gradients(compiled, examples().chunk(RANKS)[rank])
    torch.save(found, directory / f"rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
