"""A user's function as a metric, and tasks by name: what `acm.evaluate` is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from acm_compiler.data.batch import Batch
from acm_compiler.errors import UsageError
from acm_compiler.recipe.sections import task_section
from acm_compiler.tasks.base import Task, names_share
from acm_compiler.tasks.open_task import open_task
from acm_compiler.tasks.users_task import NEEDED, as_task, missing_parts

Score = Callable[[Any, Batch], Tensor]
_KINDS = "classify, causal_lm, masked_lm, embed, ctc, python:package.module:function"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetric(Task):
    """What measuring asks of a `Task`: `function(output, batch)` gives one score per example, [B]."""

    function: Score
    metric: str = field()  # without it the property of `Task` would be the default
    lower_is_better: bool = False

    @property
    def is_share(self) -> bool:
        """As its name says: for an accuracy or an error rate."""
        return names_share(self.metric)

    def score(self, output: Any, batch: Batch) -> Tensor:
        """The function's scores as fp32 [B]. UsageError where there is not one per example."""
        found, size = self.function(output, batch), len(next(iter(batch.values())))
        if not isinstance(found, Tensor) or tuple(found.shape) != (size,):
            shown = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(
                "metric must return one score per example",
                where=self.metric,
                found=shown,
                expected=f"a tensor of shape ({size},)",
                fix="leave the mean over examples to evaluate",
            )
        return found.float()


def task_for(
    given: Task | str | Mapping[str, Any] | None,
    metric: Score | None,
    *,
    lower_is_better: bool = False,
    dataset: Any = None,
    model: nn.Module,
) -> Task:
    """The task that `given` is or names (as in a recipe), or one of `metric` alone. UsageError for both or neither."""
    if (given is None) == (metric is None):
        raise UsageError(
            "exactly one of task and metric must be given",
            found="neither" if given is None else "both",
            expected=f"task= one of {_KINDS}, or metric= a function of (output, batch)",
        )
    if metric is not None and not callable(metric):
        raise UsageError(
            "metric must be a function",
            found=repr(metric) if isinstance(metric, (str, int, float)) else type(metric).__name__,
            expected="one of (output, batch), which gives one score per example",
            fix="what has a name goes to task=" if isinstance(metric, str) else None,
        )
    if metric is not None:
        name = getattr(metric, "__name__", type(metric).__name__).strip("<>").replace("_", " ")
        return OwnMetric(
            function=metric, metric="metric" if name == "lambda" else name, lower_is_better=lower_is_better
        )
    if isinstance(given, (str, Mapping)):
        return open_task(task_section(given, where="task"), dataset, model)
    missing = missing_parts(given, NEEDED[:-1])
    if missing or isinstance(given, type):
        found = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise UsageError(
            "task must be a task or the name of one",
            found=f"{found} without {', '.join(missing)}" if missing else found,
            expected=_KINDS,
            fix="a function that scores outputs goes to metric=",
        )
    return as_task(given)
