"""The protocol between data, models and training: tasks and metrics.

A user's own object is a task, too: what it leaves out is filled in, what it raises is reported with the user's lines.

Shapes: B examples, E examples of a data set, D features, C classes, ... tokens or frames.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm.precision import to_float64
from acm_compiler.data.batch import Batch, size_of
from acm_compiler.errors import DataError, UsageError
from acm_compiler.passes.capture.forward import output_of
from acm_compiler.recipe.tasks import names_share
from acm_compiler.sources.inputs import Inputs, in_mode
from acm_compiler.sources.user_code import is_users, users_code


class Task:
    """Turns a batch of B examples into a model's inputs, and the model's output into a loss and a metric.

    Metric, loss, score and answer are every task's own; the rest has these defaults, which `as_task` also gives to
    objects of other classes. Nothing here keeps state: every method is a function of its arguments.
    """

    @property
    def metric(self) -> str:
        """Name of the metric, such as `accuracy`."""
        raise NotImplementedError

    def inputs(self, batch: Batch) -> Inputs:
        """The arguments of the model's call: the image, or else all tensors of the batch that are for the model."""
        return batch["image"] if "image" in batch else named_inputs(batch)

    def mask(self, batch: Batch) -> Tensor | None:
        """bool [B, S], False at padding: the batch's `attention_mask`; None where all tokens count."""
        mask = batch.get("attention_mask")
        return None if mask is None else mask.bool()

    def call_arguments(self, batch: Batch) -> tuple[Inputs, Tensor | None]:
        """The inputs, and the padding mask that `acm.batch` has to be told: None where they carry the same themselves.

        Read from the call it is one of frames where it was one of audio, and holds for sites alone whose tokens it
        fits.
        """
        inputs, mask_BS = self.inputs(batch), self.mask(batch)
        carried = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        known = mask_BS is not None and carried is not None and torch.equal(mask_BS, carried.bool())
        return inputs, None if known else mask_BS

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The loss of the model's output, a scalar: the mean over the batch."""
        raise NotImplementedError

    def counted(self, batch: Batch) -> Tensor:
        """The number, a scalar, of examples that `loss` is the mean over, or of tokens."""
        return torch.tensor(size_of(batch))

    def score(self, output: Any, batch: Batch) -> Tensor:
        """fp32 [B]: one value per example; scale(total score / total units) is the metric."""
        raise NotImplementedError

    def answer(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """[B, …]: what matters of the model's output, to compare two models by: its squared difference is the damage.

        `mask` is the batch's, where it is known.
        """
        raise NotImplementedError

    @property
    def lower_is_better(self) -> bool:
        """True of errors and perplexities."""
        return False

    @property
    def is_share(self) -> bool:
        """True of metrics that count right or wrong predictions, and read best in percent."""
        return False

    @property
    def answers_logits(self) -> bool:
        """True where the last axis of `answer` holds logits, 0 where there is no token: distances are KL then."""
        return False

    @property
    def needs_dense(self) -> bool:
        """True where `remember` puts something into the batch."""
        return type(self).remember is not Task.remember

    def logits(self, output: Any) -> Tensor | None:
        """The logits in the output, of which `answer` makes what it makes of the whole; None where there are none."""
        return None

    def judged_by(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """[B, …]: what calibration compares two models by: squared, a change is damage."""
        return self.answer(output, mask)

    def units(self, batch: Batch) -> Tensor:
        """[B]: what each example's score counts for, such as words or tokens."""
        return torch.ones(size_of(batch))

    def scale(self, mean: Tensor) -> Tensor:
        """The metric, from the score per unit: exp, for a perplexity."""
        return mean

    def remember(self, output: Any, batch: Batch) -> Batch:
        """The batch with what `loss` and `score` need to know of the dense model's output."""
        return batch

    @property
    def likeness(self) -> Likeness | None:
        """A comparison of the outputs of two models over a whole data set, beside the metric."""
        return None

    def value(self, score_E: Tensor, unit_E: Tensor) -> float:
        """The metric over E examples."""
        return float(self.scale(to_float64(score_E).sum() / to_float64(unit_E).sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """A second measure beside a task's metric: one number from two models' outputs on the same examples.

    name: what it is called; 1 where both models agree. keep: (output, batch) -> [B, ...], what has to be kept of every
    example (or of every token). compare: (one model's [E, ...], the other's) -> the number.
    """

    name: str
    keep: Callable[[Any, Batch], Tensor]
    compare: Callable[[Tensor, Tensor], float]


_NOT_FOR_THE_MODEL = frozenset({"label", "index", "source", "foreground", "teacher"})


def part_of(output: Any, name: str, what: str, *, axes: str, task: str, fix: str) -> Tensor:
    """A model's output itself, or its part `name`, a tensor of these axes (by commas). UsageError where it is none."""
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, output)
    if isinstance(found, Tensor) and found.ndim == len(axes.split(", ")):
        return found
    shown = type(output).__name__
    if isinstance(output, Tensor):
        shown = f"a tensor of shape {tuple(output.shape)}"
    elif isinstance(output, Mapping):
        shown += f" with {', '.join(map(str, output))}"
    raise UsageError(
        f"the model's output holds no {what}",
        where=f"task {task}",
        found=shown,
        expected=f"a tensor [{axes}], or an output with such `{name}`",
        fix=fix,
    )


def base_metric(model: nn.Module, batches: Iterable[Batch], task: Task) -> float:
    """The task's metric of a model without ACMs, over examples on its device; in eval mode, without gradients."""
    scores, units = [], []
    with torch.no_grad(), in_mode(model, training=False):
        for batch in batches:
            output = output_of(model, task.inputs(batch))
            scores.append(task.score(output, task.remember(output, batch)).cpu())
            units.append(task.units(batch).cpu())
    return task.value(torch.cat(scores), torch.cat(units))


def entry_of(batch: Batch, name: str, what: str, *, task: str) -> Tensor:
    """The batch's tensor of that name. DataError where it has none."""
    if name not in batch:
        expected = f"a tensor named {name!r} in every example"
        raise DataError(
            f"the data set gives no {what}", where=f"task {task}", found=", ".join(batch), expected=expected
        )
    return batch[name]


def named_inputs(batch: Batch) -> Batch:
    """All tensors of the batch, by name, but for what is known about the examples."""
    return {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}


NEEDED = ("metric", "inputs", "mask", "score", "answer")
_OWN = ("metric", "loss", "score", "answer")


def as_task(given: Any, name: str | None = None) -> Task:
    """`given`, if it is a task of this package; else a task that is all as it is, with the defaults of `Task`.

    name: what built it, named in FunctionFailed where one of its methods raises; None leaves errors as they are.
    """
    return UsersTask(given, name) if is_users(given) else given


def missing_parts(given: Any, needed: Iterable[str]) -> list[str]:
    """The parts of a task that an object lacks; a subclass of `Task` has its inputs and its mask."""
    if isinstance(given, UsersTask):
        return missing_parts(given._given, needed)
    if isinstance(given, Task):
        return [part for part in needed if part in _OWN and getattr(type(given), part) is getattr(Task, part)]
    return [part for part in needed if not hasattr(given, part)]


class UsersTask(Task):
    """A user's object first, the defaults of `Task` where it has nothing of a name."""

    def __init__(self, given: Any, name: str | None) -> None:
        self._given, self._name = given, name

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._given, name):
            return object.__getattribute__(self, name)
        found = getattr(self._given, name)
        if not callable(found):
            return found
        call = functools.partial(_call, self._name and f"{self._name}: {name}", found)
        return functools.partial(_scores, call) if name == "score" else call

    @property
    def is_share(self) -> bool:
        """True if the name of the metric is that of a share."""
        return names_share(self.metric)

    @property
    def needs_dense(self) -> bool:
        """True if it remembers something of the dense model."""
        return hasattr(self._given, "remember")


def _scores(score: Callable[[Any, Batch], Any], output: Any, batch: Batch) -> Tensor:
    """The scores of a user's task."""
    return one_per_example(score(output, batch), batch, "score must give one number per example")


def one_per_example(found: Any, batch: Batch, rule: str, **told: str) -> Tensor:
    """`found`, a user's scores of a batch; UsageError with `rule`, and what else is told, unless it is a tensor [B]."""
    size = size_of(batch)
    if not isinstance(found, Tensor) or found.shape != (size,):
        raise UsageError(
            rule,
            found=f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__,
            expected=f"a tensor [{size}] for a batch of {size}",
            **told,
        )
    return found


def _call(name: str | None, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with nullcontext() if name is None else users_code(name, "the task raised"):
        return method(*args, **kwargs)
