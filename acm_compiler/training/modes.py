"""Putting a model into the state that a phase needs, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.passes.rewrite.conversion import conversion_of


@contextmanager
def only_training(model: nn.Module, group: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, exactly the parameters of `group` require gradients; flags come back, gradients are dropped."""
    chosen = {id(parameter) for parameter in group}
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in chosen)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the model is in train or eval mode; every module's own mode comes back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, mode in before:
            module.training = mode


def free_gate(acm: ACM) -> None:
    """Let the gate decide over all its k with the knob at 0, as the paper trains it; an older budget table is void."""
    owner = conversion_of(acm)
    owner.table = owner.budget = owner.cap = None
    acm.set_choices(knob=0.0, k_lo=acm.k_min, k_hi=acm.count)
