"""Processes of a sharded run: `torchrun -m tests.helpers.sharded_ranks DIR WORK…`, of `WORK`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import acm_compiler as acm
from acm_compiler.errors import NoBudgetTable, RunInterrupted
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.training import loop
from acm_compiler.training.machine import Machine, open_machine
from acm_compiler.training.schedule import run_schedule
from acm_compiler.training.sharding import shard, whole
from tests.helpers.models import Mlp, Residual, Stack, example
from tests.helpers.training_process import SCHEDULE, Signalling, weights
from tests.helpers.training_ranks import CONFIGS, train_each
from tests.helpers.training_runs import fitted, job_in
from tests.helpers.training_tiny import make_model

Found = dict[str, Tensor]


def bytes_here(tensors: Any) -> int:
    """Bytes of tensors, or of this process's parts of them."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def count_bytes(held: Found) -> None:
    """Have every phase note, at its end, the bytes that this process holds of parameters and of Adam's moments."""
    train = loop.PhaseLoop.train

    def counted(self: loop.PhaseLoop, snapshot: Any) -> None:
        train(self, snapshot)
        states = self.optimization.optimizer.state.values()
        moments = [tensor for state in states for key, tensor in state.items() if key != "step"]
        parts = bytes_here(self.run.model.parameters()), bytes_here(moments)
        held[f"held/{self.phase.name}"] = torch.tensor(parts)

    loop.PhaseLoop.train = counted  # type: ignore[method-assign]


def train_all(directory: Path, *, at: int = 0, resume: bool = False) -> nn.Module:
    """A model after distill, gate and finetune; `at`: of which batch of this start a signal arrives."""
    model = make_model()
    job = job_in(directory, padded=True, save_every="2steps", sharded=True, task=Signalling(at))
    run_schedule(model, SCHEDULE, job, resume=resume)
    return model


def resumed(directory: Path, machine: Machine) -> Found:
    """A schedule that was interrupted in each phase, beside one that was not."""
    for at in (4, 5, 6):  # after step 4 of distill, 4 of gate, 5 of finetune
        try:
            train_all(directory / "resumed", at=at, resume=at > 4)
        except RunInterrupted:
            continue
        raise AssertionError("no interruption")
    models = {"resumed": train_all(directory / "resumed", resume=True), "straight": train_all(directory / "straight")}
    return {f"{name}/{key}": tensor for name, model in models.items() for key, tensor in weights(model).items()}


def uneven(directory: Path, machine: Machine) -> Found:
    """Gradients of a second layer that runs at k = N alone, where the tokens of the first process alone choose N."""
    model = fitted(make_model())
    top = model.blocks[0].mlp
    top.learners.w_top = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))
    top.set_choices(knob=0.0, k_lo=4, k_hi=4)
    model(x).square().sum().backward()
    alone = top.learners.w_top.grad
    model.zero_grad(set_to_none=True)
    shard(model, machine)
    if not machine.is_main:
        top.set_choices(knob=0.0, k_lo=0, k_hi=0)
    model(x).square().sum().backward()
    return {"top/alone": alone, "top/sharded": whole(top.learners.w_top.grad) * machine.world}


def half(directory: Path, machine: Machine) -> Found:
    """The finetune phase in bfloat16."""
    model = train_each(directory / "half", ["finetune"], sharded=True, precision="bf16")["finetune"]
    return {f"half/{key}": tensor for key, tensor in weights(model).items()}


def recalibrated(directory: Path, machine: Machine) -> Found:
    """Rows of the budget table of a sharded model that had none, and of the whole one; and what untrained gates are."""
    torch.manual_seed(0)
    original = Stack(Residual(Mlp()), Residual(Mlp())).eval()
    batches = [example() for _ in range(7)]  # no multiple of the processes
    model = acm.rewrite(original, acm.plan(original, example(), sites="mlp"))
    acm.calibrate(model, batches, tokens=100)
    found = {}
    for name in ("whole", "sharded"):
        conversion(model).table = None
        points = acm.recalibrate(model, batches, tokens=10_000).points
        found[f"rows/{name}"] = torch.tensor([[point.share, point.knob] for point in points])
        if name == "whole":
            shard(model, machine)
    untrained = acm.rewrite(original, acm.plan(original, example(), sites="mlp"))
    shard(untrained, machine)
    try:
        acm.recalibrate(untrained, batches)
    except NoBudgetTable:
        return found
    raise AssertionError("a table of what chance chooses")


WORK: dict[str, Callable[[Path, Machine], Found]] = {
    "resumed": resumed,
    "uneven": uneven,
    "half": half,
    "recalibrated": recalibrated,
}


def main() -> None:
    """Train, and keep what every process ended with."""
    torch.set_num_threads(1)
    directory, machine, work = Path(sys.argv[1]), open_machine(sharded=True), sys.argv[2:]
    found: Found = {}
    count_bytes(found)
    models = train_each(directory, [name for name in work if name in CONFIGS], sharded=True)
    found |= {f"{name}/{key}": tensor for name, model in models.items() for key, tensor in weights(model).items()}
    for name in work:
        if name in WORK:
            found |= WORK[name](directory, machine)
    save_file(found, directory / f"rank{machine.rank}.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
