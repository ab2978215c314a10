"""A method: one way to make a dense model cheaper, at every budget that it reaches.

A budget is a share of the dense model's MACs here, whatever part of the model a method acts on.
Shapes: B examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say
from acm_compiler.tasks import Task
from acm_compiler.training.job import Job


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
