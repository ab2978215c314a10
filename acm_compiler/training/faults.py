"""Saying where a training run broke and what to change."""

from __future__ import annotations

import torch
from torch import nn

from acm_compiler.errors import TrainingFailed
from acm_compiler.passes.rewrite.conversion import sites


def failure(model: nn.Module, what: str | None, *, where: str) -> TrainingFailed:
    """The error for a step whose loss (`what`) or gradients are not finite, naming the first place that shows it."""
    place = _first(model, gradients=False) or _first(model, gradients=True)
    found = what or "the gradient"
    return TrainingFailed(
        f"{found} is not finite" + (f"; first seen at {place}" if place else ""),
        where=where,
        fix="lower lr, keep clip_norm at 1.0, train in precision fp32 or bf16, and look for values in the data that "
        "are not finite; the last saved state is from before this step",
    )


def _first(model: nn.Module, *, gradients: bool) -> str | None:
    """The first parameter whose value (or gradient) is not finite, by its site if it belongs to one."""
    owner = {id(p): f"site {name}" for name, acm in sites(model).items() for p in acm.parameters()}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None and not torch.isfinite(tensor).all():
            return owner.get(id(parameter), f"parameter {name}")
    return None
