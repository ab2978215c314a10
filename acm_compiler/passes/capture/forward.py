"""A model's forward on one of a user's batches, and its own error in words where it raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from acm_compiler.errors import AcmError, UsageError
from acm_compiler.passes.capture.graph import tensors
from acm_compiler.sources.inputs import Inputs, call_model
from acm_compiler.sources.user_code import Attempt, first_line, raising_line, with_frames


def output_of(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for one batch; UsageError, with the model's own error, where it raises."""
    attempt = Attempt()
    with attempt:
        return call_model(model, inputs)
    error = attempt.error
    assert error is not None
    if isinstance(error, (AcmError, MemoryError, torch.OutOfMemoryError)):
        raise error
    what = "name the model's arguments in every batch, {'x': x, 'other': y}; leave out labels that it does not take"
    raise UsageError(
        f"the model itself raises on a batch of {shapes_of(inputs)}",
        where=raising_line(error),
        found=first_line(error),
        expected="what the model takes, in its type and on its device",
        fix=with_frames(what, error),
    ) from error


def shapes_of(inputs: Inputs) -> str:
    """The tensors of a batch as `float32 [8, 3, 32, 32] on cpu`."""
    shown = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}" for t in tensors(inputs)]
    return ", ".join(shown) or "no tensors"
