"""A phase as the loop sees it: a parameter group, a way to run a batch, figures per step, and the model's modes.

Also the job that all phases of a run share: task, data, directory, callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.data import Batch, BatchStream
from acm_compiler.passes.rewrite.conversion import conversion_of
from acm_compiler.recipe.phases import CalibratePhase
from acm_compiler.recipe.phases import Phase as PhaseConfig
from acm_compiler.recipe.schema import RunConfig
from acm_compiler.sources.inputs import Example
from acm_compiler.tasks import Task

Backward = Callable[[Tensor], None]
# opens the training data: the batches of so many examples over all `world` processes, as process `rank` sees them,
# by keywords `batch`, `seed`, `rank` and `world`
OpenData = Callable[..., BatchStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a schedule needs beside the model.

    budget: the share of learner MACs that finetune aims at. directory: where `metrics.jsonl` and `state/` go.
    teacher: the model before conversion, for phases that learn from its outputs.
    decisions: of the recipe, as plain data; a state is continued only by a recipe with the same ones.
    resume_command: shown when interrupted.
    measure: called with the model after each gate and finetune phase, unless the next one frees the gates again; keeps
    the model's new budget table.
    calibrate: called with the model, a calibrate phase's section, and (inputs, mask) pairs on the run's device.
    evaluate: called every `run.eval_every` of a finetune phase; its figures go into `metrics.jsonl`.
    on_phase_end: called after each phase with the model, its section of the recipe, and the seconds it took.
    All processes make these calls.
    say: takes a line on a phase's progress, now and then, where no terminal shows a bar; the log when unset.
    """

    task: Task
    data: OpenData
    run: RunConfig
    directory: Path
    budget: float
    teacher: nn.Module | None = None
    decisions: Mapping[str, Any] = field(default_factory=dict)
    resume_command: str = "acmc rewrite --resume"
    measure: Callable[[nn.Module], object] | None = None
    calibrate: Callable[[nn.Module, CalibratePhase, Iterator[Example]], object] | None = None
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None
    on_phase_end: Callable[[nn.Module, PhaseConfig, float], object] | None = None
    say: Callable[[str], None] | None = None


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
