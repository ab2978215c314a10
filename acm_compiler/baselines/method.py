"""A method: one way to make a dense model cheaper, at every budget that it reaches, and the MACs of what it runs.

A budget is a share of the dense model's MACs here, whatever part of the model a method acts on.
Shapes: B examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.passes.find.count_macs import Work
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say
from acm_compiler.runtime.count_dense_work import kept_work_watched
from acm_compiler.sources.inputs import Inputs, call_model
from acm_compiler.tasks import Task
from acm_compiler.training.phase import Job

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, data and task that methods are compared on.

    fit: training examples without augmentation, the same ones every time, and held_out: others. folder: where the
    ACMs were saved. steps: optimizer steps of every model that is trained. job: the data, settings and folder of the
    training of the method of a name. replan: the plan with so many learners at every site.
    """

    dense: nn.Module
    plan: Plan
    task: Task
    fit: Callable[[], Iterable[Batch]]
    held_out: Callable[[], Iterable[Batch]]
    folder: Path | None = None
    seed: int = 0
    steps: int = 0
    job: Callable[[str], Job] | None = None
    replan: Callable[[int], Plan] | None = None


class BatchResult(NamedTuple):
    """One batch at one budget: the score of each example, and the MACs that were executed for it, both [B]."""

    score_B: Tensor
    macs_B: Tensor


class Method(ABC):
    """One way to run a dense model at a share of its MACs; the dense model itself stays as it is.

    MACs are those executed for an example, with all that a method adds to choose what it runs, and the dense rest.
    """

    title: ClassVar[str]
    trains: ClassVar[bool] = False
    """True where the model is trained, by `Subject.steps` steps, not only fitted to activations."""
    masks: ClassVar[bool] = False
    """True where what does not run is computed and thrown away: the MACs saved are no time saved here."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @classmethod
    def refuses(cls, model: nn.Module, plan: Plan) -> str | None:
        """The reason why the method cannot be applied to this model, weights or not; None where it can."""
        return None

    @classmethod
    @abstractmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """The lowest budget that the method can reach on this model, as far as that is known before it is fitted."""

    @abstractmethod
    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Fit the method to the subject, so that it can run at `budgets`."""

    def reaches(self, budget: float) -> bool:
        """True if the method, once fitted, can be set to this budget."""
        return True

    @abstractmethod
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward at a budget."""

    def score(self, output: object, batch: Batch) -> Tensor:
        """The score of each example of a batch, on the CPU."""
        return self.subject.task.score(output, batch).cpu()


class _Call(nn.Module):
    """A call of something that is no module."""

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def works_of(run: Callable[[], T]) -> tuple[list[Work], T]:
    """All work that `run` does, counted as it runs, and what it returns."""
    works: list[Work] = []

    def add(found: Mapping[Any, list[Work]]) -> None:
        works.extend(work for part in found.values() for work in part)

    call = _Call()
    with kept_work_watched(call, add, side=lambda: None, when=lambda: True):
        returned = call(run)
    return works, returned


def macs_of_call(model: nn.Module, inputs: Inputs) -> int:
    """All multiply-adds of one call, counted as it runs."""
    return sum(work.macs for work in works_of(lambda: call_model(model, inputs))[0])


def setting_within(cost: Callable[[float], float], most: float, *, cheap: float, dear: float, halvings: int) -> float:
    """The setting nearest to `dear` whose cost is at most `most`, by bisection; `cheap` where none between them is.

    cost: MACs of a setting, which rise from `cheap` to `dear`. The result is off by (dear - cheap) / 2**halvings.
    """
    for _ in range(halvings):
        middle = (cheap + dear) / 2
        cheap, dear = (middle, dear) if cost(middle) <= most else (cheap, middle)
    return cheap
