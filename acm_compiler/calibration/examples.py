"""The user's batches, read once: some to fit on, some held out, kept for further passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.errors import AcmError, DataError, UsageError
from acm_compiler.inputs import Inputs, call_model, refuse_labels, split_inputs
from acm_compiler.passes.capture.capture import Attempt, first_line
from acm_compiler.passes.capture.graph import tensors
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.runtime.masks import call_mask
from acm_compiler.runtime.measure_budgets import Example
from acm_compiler.user_code import raising_line

# a user's own word on the padding of one batch
MaskOf = Callable[[Any], Tensor | None]
# one batch of so many is kept for measuring
_HELD_OUT = 6
# batches that serve for both where there are too few to hold one out
_SHARED = 2


class Examples:
    """Batches as (inputs, mask) pairs; every sixth is held out of the fit, unless `held_out` is false."""

    def __init__(self, batches: Iterable[Example], *, held_out: bool = True) -> None:
        self._batches, self._every = batches, _HELD_OUT if held_out else 0
        self.fitted: list[Example] = []
        self._held_out: list[Example] = []

    def read(self, enough: Callable[[], bool]) -> Iterator[Example]:
        """Batches to fit on until `enough()`, which is asked after each; DataError when there are none."""
        for place, (inputs, mask) in enumerate(self._batches, start=1):
            example = (_plain(inputs), None if mask is None else _plain(mask))
            if self._every and place % self._every == 0:
                self._held_out.append(example)
                continue
            self.fitted.append(example)
            yield example
            if enough():
                break
        if not self.fitted:
            raise DataError("no batches to calibrate on", fix="give an iterable of what the model takes")

    @property
    def held_out(self) -> list[Example]:
        """Batches for measuring; the first ones of the fit where there are too few to hold any out."""
        return self._held_out or self.fitted[:_SHARED]


def masked(batches: Iterable[Inputs], mask: MaskOf | None = None) -> Iterator[Example]:
    """Batches of what the model takes, each with what `mask` says of it; where that is None, its call's own holds.

    UsageError for a single batch, for what is none, and for masks of another kind.
    """
    if isinstance(batches, (Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise UsageError(
            "batches must be an iterable of what the model takes",
            found=type(batches).__name__,
            expected="a list, a loader or a generator of batches",
            fix="one batch alone: [batch]",
        )
    if mask is not None and not callable(mask):
        raise UsageError(
            "mask is asked about every batch",
            found=type(mask).__name__,
            expected="a function of one batch, which gives its mask [batch, tokens] or None",
            fix="mask=lambda batch: batch['input_ids'] != 0",
        )
    return _pairs(batches, mask)


def _pairs(batches: Iterable[Inputs], mask: MaskOf | None) -> Iterator[Example]:
    for inputs in batches:
        split_inputs(inputs)
        yield inputs, None if mask is None else _said(mask, inputs)


def _said(mask: MaskOf, inputs: Inputs) -> Tensor | None:
    """What `mask` gives for a batch; UsageError unless that is bool [batch, tokens] or None."""
    said: object = mask(inputs)
    if said is None or (isinstance(said, Tensor) and said.dtype == torch.bool and said.dim() == 2):
        return said
    raise UsageError(
        "mask gave a padding mask of another kind",
        found=_shapes((said,)) if isinstance(said, Tensor) else type(said).__name__,
        expected="bool [batch, tokens], True at real tokens, or None",
        fix="compare, as in ids != 0, or end with .bool()",
    )


def run(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for one batch; UsageError, with the model's own error, where it raises."""
    refuse_labels(inputs, planned=conversion(model).plan.model.inputs)
    attempt = Attempt()
    with attempt:
        return call_model(model, inputs)
    error = attempt.error
    assert error is not None
    if isinstance(error, (AcmError, MemoryError, torch.OutOfMemoryError)):
        raise error
    raise UsageError(
        f"the model itself raises on a batch of {_shapes(inputs)}",
        where=raising_line(error),
        found=first_line(error),
        expected="what the model takes, in its type and on its device",
        fix="a batch is a tensor, a tuple of arguments or a mapping; leave out labels: (x for x, label in loader)",
    ) from error


def _shapes(inputs: Inputs) -> str:
    """The tensors of a batch as `float32 [8, 3, 32, 32] on cpu`."""
    shown = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}" for t in tensors(inputs)]
    return ", ".join(shown) or "no tensors"


def mask_in(model: nn.Module, example: Example) -> Tensor | None:
    """The padding mask [batch, tokens] that is known of a batch, bool."""
    inputs, mask = example
    if mask is not None:
        return mask.bool()
    found = call_mask(model, *split_inputs(inputs))
    return None if found is None else found.tokens()


def _plain(value: Any) -> Any:
    """The same value without inference tensors, which autograd cannot use."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_plain(part) for part in value)
    return value
