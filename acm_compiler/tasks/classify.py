"""One class per example: cross entropy and accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.errors import DataError, UsageError, counted
from acm_compiler.recipe.tasks import fitting_classes
from acm_compiler.tasks.base import Likeness, Task, entry_of, part_of
from acm_compiler.tasks.distance import agreement

_IGNORED = -100  # torch's own label of an example that counts nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Classify(Task):
    """A `Task`: logits [B, C] against labels int [B], or float [B, C] where mixup has made shares of them.

    `classes` is what the data set has, if known; a model with another number of them is refused. `auto_class`: the
    transformers class that builds a model for this data, and `data` what the data set is called, for messages.
    """

    label_smoothing: float = 0.0
    classes: int | None = None
    auto_class: str = " or ".join(fitting_classes("classify"))
    data: str = field(default="the data set", compare=False)
    metric: ClassVar[str] = "accuracy"
    is_share: ClassVar[bool] = True
    answers_logits: ClassVar[bool] = True

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean cross entropy of the examples whose label is not -100, in fp32 at least; 0 without any.

        UsageError or DataError where classes do not fit.
        """
        logits = self.logits(output)
        label = self._label(batch, len(logits))
        if label.ndim == 2 or not label.is_cuda:  # there the loss refuses numbers; a check would wait for the device
            self._check_range(label, logits.shape[1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if label.is_floating_point():
            label = label.to(logits.dtype)
            return F.cross_entropy(logits, label, label_smoothing=self.label_smoothing)
        loss = F.cross_entropy(logits, label, label_smoothing=self.label_smoothing, ignore_index=_IGNORED)
        return torch.where((label != _IGNORED).any(), loss, torch.zeros_like(loss))

    def counted(self, batch: Batch) -> Tensor:
        """The examples whose label is not -100."""
        label = self._label(batch)
        return torch.tensor(len(label)) if label.is_floating_point() else (label != _IGNORED).sum()

    def score(self, output: Any, batch: Batch) -> Tensor:
        """1 where the largest logit is the label's, else 0; fp32 [B]. DataError for labels of no class."""
        logits = self.logits(output)
        label = self._label(batch, len(logits))
        self._check_range(label, logits.shape[1])
        best = label if label.ndim == 1 else label.argmax(1)
        return (logits.argmax(1) == best).float()

    def units(self, batch: Batch) -> Tensor:
        """1 for every example with a label, 0 where it is -100; fp32 [B]."""
        label = self._label(batch)
        return (label != _IGNORED).float() if label.ndim == 1 else torch.ones(len(label), device=label.device)

    def _check_range(self, label: Tensor, classes: int) -> None:
        """DataError where a label [B] is none of so many classes, nor -100; UsageError for [B, other classes]."""
        if label.ndim == 2 and label.shape[1] != classes:
            raise _classes_differ(label.shape[1], classes)
        wrong = label[((label < 0) & (label != _IGNORED)) | (label >= classes)] if label.ndim == 1 else label[:0]
        if len(wrong):
            raise DataError(
                "a label is none of the model's classes",
                where=f"task classify, {self.data}",
                found=f"label {int(wrong[0])}",
                expected=f"0 to {classes - 1}, or {_IGNORED} for an example without a label",
                fix="use the data set the model was trained on, number its classes from 0, or take another head",
            )

    @property
    def likeness(self) -> Likeness:
        """Share of examples for which two models predict the same class."""
        return Likeness(name="agreement", keep=lambda output, batch: self.logits(output).argmax(1), compare=agreement)

    def answer(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """The logits [B, C] around their mean: what shifts all classes alike changes no probability."""
        logits = self.logits(output)
        return logits - logits.mean(1, keepdim=True)

    def logits(self, output: Any) -> Tensor:
        """The logits [B, C]: the output itself, or its `logits`. UsageError when there are none."""
        fix = f"use a model with a classification head (for hf: auto_class {self.auto_class})"
        logits = part_of(output, "logits", "logits", axes="batch, classes", task="classify", fix=fix)
        if self.classes is not None and logits.shape[1] != self.classes:
            raise _classes_differ(self.classes, logits.shape[1])
        return logits

    def _label(self, batch: Batch, examples: int | None = None) -> Tensor:
        """The labels, [B] or [B, C]; DataError where they are neither, or not those of so many examples."""
        label = entry_of(batch, "label", "labels", task="classify")
        if examples is not None and label.ndim and len(label) != examples:
            raise DataError(
                "labels must be one per example",
                where=f"task classify, {self.data}",
                found=f"labels {list(label.shape)} for the logits of {counted(examples, 'example')}",
            )
        if label.ndim == 1 and not label.is_floating_point() and not label.is_complex():
            return label.long()
        if label.ndim == 2 and not label.is_complex():
            return label if label.is_floating_point() else label.float()
        raise DataError(
            "labels must be whole numbers, one per example, or a share of each class",
            where=f"task classify, {self.data}",
            found=f"{str(label.dtype).removeprefix('torch.')} {list(label.shape)}",
            expected="integers [batch], or [batch, classes]",
            fix="number the classes from 0: label.long() where the values are whole; for a regression write a task",
        )


def _classes_differ(data: int | str, model: int) -> UsageError:
    return UsageError(
        "the data set and the model have different numbers of classes",
        where="task classify",
        found=f"{data} in the data, {model} in the model",
        fix="use the data set the model was trained on, or a model with a head for these classes",
    )
