"""The protocol between data, models and training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.inputs import Inputs


@runtime_checkable
class Task(Protocol):
    """What turns a batch of B examples into a model's inputs, and the model's output into a loss and a metric.

    A task that judges by the dense model's answers also has `remember(output, batch) -> Batch`: the batch with what
    `loss` and `score` need to know of the dense model's output. Three more attributes are optional, read by
    `Metric.of`: `lower_is_better: bool`; `units(batch) -> Tensor [B]`, what each example's score counts for (words,
    tokens), so that the metric is total score over total units; `scale(mean: Tensor) -> Tensor`, which turns that
    ratio into the metric (exp, for a perplexity). `likeness: Likeness`, if there is one, compares the answers of two
    models over a whole data set, beside the metric. `answers_logits: bool`: the last axis of `answer` holds logits, 0
    where there is no token; how far they are from another model's is then told by their distributions.
    `judged_by(output, mask)`, if there is one, is what calibration compares two models by in place of `answer`. Nothing
    here keeps state: every method is a function of its arguments.
    """

    @property
    def metric(self) -> str:
        """Name of the metric, such as `accuracy`."""

    def inputs(self, batch: Batch) -> Inputs:
        """What the model is called with."""

    def mask(self, batch: Batch) -> Tensor | None:
        """bool [B, S], True at real tokens, False at padding; None: all tokens count."""

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The loss of the model's output, a scalar: the mean over the batch."""

    def score(self, output: Any, batch: Batch) -> Tensor:
        """fp32 [B]: one value per example; their mean over a data set is the metric."""

    def answer(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """[B, …]: what matters of the model's output, to compare two models by: its squared difference is the damage.

        `mask` is the batch's, where it is known.
        """


def judged_by(task: Task) -> Callable[[Any, Tensor | None], Tensor]:
    """(model output, padding mask or None) -> what calibration compares two models by: squared, a change is damage."""
    return getattr(task, "judged_by", task.answer)
