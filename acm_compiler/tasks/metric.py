"""How the scores of examples become one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.acm.precision import to_float64
from acm_compiler.data.batch import Batch
from acm_compiler.tasks.base import Task


def _one_each(batch: Batch) -> Tensor:
    return torch.ones(len(next(iter(batch.values()))))


def _as_it_is(mean: Tensor) -> Tensor:
    return mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A task's metric: scale(total score / total units); a plain mean unless the task says more."""

    name: str
    lower_is_better: bool
    units: Callable[[Batch], Tensor]
    scale: Callable[[Tensor], Tensor]

    @staticmethod
    def of(task: Task) -> Metric:
        """The metric of a task, with what it leaves out filled in."""
        return Metric(
            name=task.metric,
            lower_is_better=getattr(task, "lower_is_better", False),
            units=getattr(task, "units", _one_each),
            scale=getattr(task, "scale", _as_it_is),
        )

    def value(self, score_E: Tensor, unit_E: Tensor) -> float:
        """The metric over E examples."""
        return float(self.scale(to_float64(score_E).sum() / to_float64(unit_E).sum()))
