"""Short runs of a schedule on the tiny model, as the training tests make them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.data.loading import BatchStream
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.recipe.fields import parse_every
from acm_compiler.recipe.phases import DistillPhase, FinetunePhase, GatePhase
from acm_compiler.recipe.schema import RunConfig
from acm_compiler.training.phase import Figures, Job, only_training, parameters_of
from tests.helpers.training_tiny import Points, Task


def distill(**changes) -> DistillPhase:
    """A few steps of distillation."""
    return DistillPhase(**{"phase": "distill", "steps": 6, "batch": 8, "lr": 1e-2} | changes)


def gate(**changes) -> GatePhase:
    """A few steps of gate training."""
    return GatePhase(**{"phase": "gate", "steps": 6, "batch": 8, "lr": 1e-2} | changes)


def finetune(**changes) -> FinetunePhase:
    """A few steps of finetuning."""
    return FinetunePhase(**{"phase": "finetune", "steps": 6, "batch": 8, "lr": 1e-2} | changes)


def job_in(
    directory: Path,
    *,
    padded: bool = False,
    precision: str = "fp32",
    save_every: str = "1h",
    sharded: bool = False,
    **changes,
) -> Job:
    """A job on `Points`."""
    every = {"save_every": parse_every(save_every), "eval_every": parse_every("2steps")}
    run = RunConfig(seed=3, precision=precision, sharded=sharded, **every)
    data = functools.partial(BatchStream, dataset=Points(padded=padded), shuffle=True, drop_last=True)
    return Job(**{"task": Task(), "data": data, "run": run, "directory": directory, "budget": 0.6} | changes)


def metrics(directory: Path) -> list[dict]:
    """The lines of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def parts_of(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Copies of all parameters by the part of the model that they belong to."""
    parts: dict[str, dict[str, Tensor]] = {"learners": {}, "gate": {}, "dense": {}, "rest": {}}
    for name, parameter in model.named_parameters():
        part = next((part for part in ("learners", "gate", "dense") if f".{part}." in name), "rest")
        parts[part][name] = parameter.detach().clone()
    return parts


def changed(before: dict[str, dict[str, Tensor]], model: nn.Module) -> set[str]:
    """The parts of which any parameter is another than before, bit for bit."""
    after = parts_of(model)
    return {part for part in before if any(not v.equal(after[part][n]) for n, v in before[part].items())}


def fitted(model: nn.Module) -> nn.Module:
    """`model` with learners that answer, as after distillation."""
    for acm in sites(model).values():
        acm.state = "learners"
    return model


def examples(count: int, *, padded: bool = False) -> dict[str, Tensor]:
    """The first examples of `Points` as one batch."""
    items = [Points(padded=padded)[i] for i in range(count)]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def run_once(phase: Any, batch: dict[str, Tensor]) -> tuple[Figures, dict[int, Tensor]]:
    """The figures of one batch, and the gradients by the parameters' ids, as the loop makes them."""
    with only_training(phase.model, parameters_of(phase.groups)), phase.opened():
        phase.run(batch, backward=lambda loss: loss.backward(), last=True)
        return phase.finish(), {id(p): p.grad.clone() for p in parameters_of(phase.groups) if p.grad is not None}
