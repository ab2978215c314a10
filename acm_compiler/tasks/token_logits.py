"""Logits of tokens: found in a model's output, and what of them matters.

Shapes: B texts, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from acm_compiler.calibration.damage import root_probabilities
from acm_compiler.data.batch import Batch
from acm_compiler.errors import DataError, UsageError


def token_logits(output: Any, *, task: str, auto_class: str) -> Tensor:
    """The logits [B, S, V]: the output itself, or its `logits`. UsageError when there are none."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise UsageError(
            "the model's output holds no logits of tokens",
            where=f"task {task}",
            found=type(output).__name__,
            expected="logits [batch, tokens, vocabulary]",
            fix=f"use a model with a language head (for hf: auto_class {auto_class})",
        )
    return logits


def centred(logits_BSV: Tensor, mask: Tensor | None) -> Tensor:
    """The logits without their mean over V, which changes no probability; 0 where `mask` [B, S] is."""
    centred_BSV = logits_BSV - logits_BSV.mean(-1, keepdim=True)
    return centred_BSV if mask is None else centred_BSV * mask[..., None]


def roots(logits_BSV: Tensor, mask: Tensor | None) -> Tensor:
    """`root_probabilities` of the logits; 0 where `mask` [B, S] is."""
    roots_BSV = root_probabilities(logits_BSV)
    return roots_BSV if mask is None else roots_BSV * mask[..., None]


def tokens_of(batch: Batch, *, task: str) -> Tensor:
    """The batch's `input_ids` [B, S]. DataError where it has none."""
    if "input_ids" not in batch:
        raise DataError(
            "the data set gives no tokens",
            where=f"task {task}",
            found=", ".join(batch),
            expected="a tensor named 'input_ids' in every example",
        )
    return batch["input_ids"]
