"""What of a batch is padding, and what of it is for a model."""

from __future__ import annotations

from torch import Tensor

from acm_compiler.data.batch import Batch

_NOT_FOR_THE_MODEL = frozenset({"label", "index", "source", "foreground", "teacher"})


def padding_mask(batch: Batch) -> Tensor | None:
    """The batch's `attention_mask` as bool [B, S], False at padding; None where it has none."""
    mask = batch.get("attention_mask")
    return None if mask is None else mask.bool()


def named_inputs(batch: Batch) -> Batch:
    """All tensors of the batch, by name, but for what is known about the examples."""
    return {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}
