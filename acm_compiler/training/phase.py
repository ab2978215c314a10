"""A phase as the loop sees it: a parameter group, a way to run a batch, figures per step, and the model's modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.data import Batch, BatchStream
from acm_compiler.passes.rewrite.conversion import conversion_of

Backward = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that are trained alike; `lr`: their learning rate at the start, None for the phase's."""

    parameters: Sequence[nn.Parameter]
    lr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one optimizer step of all processes.

    terms: name -> value, "loss" among them. reached: the share of learner MACs of the gates' choices, None where no
    gate chose. asked: the share this step aimed at, None for the run's. choices: site -> how many real tokens took each
    of its choices. not_finite: what was not, if anything.
    """

    terms: dict[str, float]
    reached: float | None = None
    asked: float | None = None
    choices: dict[str, list[float]] = field(default_factory=dict)
    not_finite: str | None = None


class Phase(Protocol):
    """One phase of a schedule on one model. The loop knows nothing else of either.

    name: the phase's in the recipe. groups: exactly what it trains. answers: whether the model runs its ACMs meanwhile,
    so that it can be measured. The global generators are seeded alike in all processes: see `SharedNoise`.
    """

    name: str
    groups: list[Group]
    answers: bool

    def prepare(self, batches: BatchStream, steps: int) -> None:
        """Get ready what `steps` steps on these batches need and keep beside the model; an interrupted one goes on."""

    def opened(self) -> AbstractContextManager[None]:
        """Inside, the model is ready to run batches; nothing of that stays on it."""

    def run(self, batch: Batch, *, backward: Backward, last: bool) -> None:
        """Forward and backward of one batch; gradients add up. `last` before the optimizer's step."""

    def finish(self) -> Figures:
        """Make the gradients those of the batches of all processes since the last call, and sum up."""

    def complete(self) -> None:
        """Note on the model that the phase has run to its end."""


def parameters_of(groups: Iterable[Group]) -> list[nn.Parameter]:
    """All parameters of the groups."""
    return [parameter for group in groups for parameter in group.parameters]


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Each parameter once, in the order of its first appearance."""
    return list({id(parameter): parameter for parameter in parameters}.values())


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


def free_gate(acm: ACM) -> None:
    """Let the gate decide over all its k with the knob at 0, as the paper trains it; an older budget table is void."""
    owner = conversion_of(acm)
    owner.table = owner.budget = owner.cap = None
    acm.set_choices(knob=0.0, k_lo=acm.k_min, k_hi=acm.count)
