"""Weights that another library has quantised, weight only: tensors that hold integers or float8, and stand for floats.

torchao's are such. They stay what they are in memory and in state dicts; each call computes with the floats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_OWN = frozenset((nn.Parameter, Tensor, type(None)))


def floats_of(tensors: Iterable[Tensor | None]) -> Iterable[Any]:
    """The same tensors, those of other libraries as the floats that they stand for."""
    held = list(tensors)
    if _OWN.issuperset(map(type, held)):  # before a loop in Python, which outlasts a small kernel
        return held
    return [tensor.dequantize() if tensor is not None and stands_for_floats(tensor) else tensor for tensor in held]


def stands_for_floats(tensor: Tensor) -> bool:
    """True for a tensor of another library that says itself which floats it stands for."""
    return type(tensor).dequantize is not Tensor.dequantize and tensor.is_floating_point()


def kind_of(tensors: Iterable[Tensor | None]) -> str | None:
    """The form of learners' weights: int8 or int4, the name of another library's tensors, None for floats."""
    for tensor in tensors:
        if tensor is None:
            continue
        if stands_for_floats(tensor):
            return f"{type(tensor).__module__}.{type(tensor).__name__}"
        if tensor.dtype in (torch.int8, torch.uint8):
            return "int8" if tensor.dtype == torch.int8 else "int4"
    return None
