"""Processes of a data-parallel run: `torchrun -m tests.helpers.training_ranks DIR PHASE…`."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from acm_compiler.training.loss_terms import budget_loss, diversity_loss, gather_examples
from acm_compiler.training.machine import Machine, open_machine
from acm_compiler.training.schedule import run_schedule
from tests.helpers.training_process import weights
from tests.helpers.training_runs import distill, finetune, fitted, gate, job_in
from tests.helpers.training_tiny import make_model

CONFIGS = {
    "distill": distill(steps=4, batch=8),
    "distill_accumulated": distill(steps=2, batch=8, accumulate=2),
    "gate": gate(steps=4, batch=8),
    "finetune": finetune(steps=4, batch=8, lr=1e-3, budget=1.0, diversity=1.0),
    "finetune_accumulated": finetune(steps=2, batch=8, lr=1e-3, accumulate=2),
}
SHARES = (0.2, 0.9, 0.4, 0.5, 0.7)
SPLIT = (2, 3)


def train_each(directory: Path, phases: Iterable[str] = CONFIGS, **options: Any) -> dict[str, nn.Module]:
    """A model trained by each of `phases` alone, without dropout; options: of `job_in`."""
    models = {}
    for name in phases:
        models[name] = fitted(make_model())
        for block in models[name].blocks:
            block.dropout.p = 0.0
        run_schedule(models[name], [CONFIGS[name]], job_in(directory / name, padded=True, **options))
    return models


def share_gradient(share_B: Tensor) -> Tensor:
    """The gradient of both losses over all examples to these ones."""
    share_B = share_B.clone().requires_grad_()
    every_B = gather_examples(share_B)
    (budget_loss(every_B, 0.3) + diversity_loss(every_B)).backward()
    assert share_B.grad is not None
    return share_B.grad


def own_part(machine: Machine) -> Tensor:
    """This process's shares of `SHARES`; the processes have different numbers of them."""
    return torch.tensor(SHARES).split(SPLIT)[machine.rank]


def main() -> None:
    """Train, and keep what every process ended with."""
    torch.set_num_threads(1)
    atexit.register(expect_to_have_left)  # runs after what is registered later
    directory, machine = Path(sys.argv[1]), open_machine(sharded=False)  # but for accelerate's own configuration
    models = train_each(directory, sys.argv[2:] or CONFIGS)
    found = {f"{phase}/{name}": t for phase, model in models.items() for name, t in weights(model).items()}
    found["gradient"] = share_gradient(own_part(machine))
    save_file(found, directory / f"rank{machine.rank}.safetensors")
    torch.distributed.barrier()


def expect_to_have_left() -> None:
    """Fail where Python would end with the group's threads running, which can abort the process."""
    if torch.distributed.is_initialized():
        os._exit(1)


if __name__ == "__main__":
    main()
