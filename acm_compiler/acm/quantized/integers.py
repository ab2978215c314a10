"""Learners whose weights are no floats: integers of 8 bits (`int8`) or 4 (`int4`), made of floats and multiplied.

Tensors of another library that stand for floats, as torchao's do, stay what they are in memory and in state dicts; each
call computes with the floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from acm_compiler.acm.quantized import int4, int8

if TYPE_CHECKING:
    from acm_compiler.acm.arguments import Weights

WEIGHTS = ("w_in", "w_up", "w_out", "w_top")
"""The tensors that become integers."""
SCALES = ("s_in", "s_up", "s_out", "s_top")
"""Their scales, in the same order."""
To = Literal["int8", "int4"]
BLOCK = 256
"""Tokens that are computed at once."""


def quantized(weights: Weights, to: To = "int8") -> Weights:
    """The same weights as integers with scales; biases stay as they are."""
    made: dict[str, Any] = {}
    for name, scale in zip(WEIGHTS, SCALES, strict=True):
        weight = getattr(weights, name)
        if weight is not None and to == "int4":
            made[name], made[scale] = int4.quantize_weight(weight, **_groups(weights, name))
        elif weight is not None:
            made[name], made[scale] = int8.quantize_weight(weight, _summed(weights, name))
    return replace(weights, **made)


def dequantized(weights: Weights) -> Weights:
    """The floats that integers stand for, in the type of the biases."""
    made: dict[str, Any] = dict.fromkeys(SCALES)
    for name, scale in zip(WEIGHTS, SCALES, strict=True):
        weight, of = getattr(weights, name), getattr(weights, scale)
        if weight is None:
            continue
        if weights.is_int4:
            floats = int4.dequantize_weight(weight, of, **_groups(weights, name))
        else:
            floats = int8.dequantize_weight(weight, of, _summed(weights, name))
        made[name] = floats.to(weights.b_out.dtype)
    return replace(weights, **made)


def restore_scales(module: nn.Module, scales: Mapping[str, Tensor]) -> None:
    """Give a module's scales, by name, the type back that they had where others have changed the module's."""
    for name, former in scales.items():
        moved = getattr(module, name)
        if moved.dtype != former.dtype:
            setattr(module, name, former.to(moved.device))


def _summed(weights: Weights, name: str) -> tuple[int, ...]:
    """The axes of a weight that a product sums over, those of all learners at once."""
    if name == "w_in" and weights.form == "cols":
        return (0, 2, 3)
    return (-2, -1) if name == "w_out" else (-1,)


def _groups(weights: Weights, name: str) -> dict[str, int]:
    """Count the axes that a weight is summed over, and the parts, one a learner, that its groups lie in."""
    top = name == "w_top" and weights.form != "linear"
    return {"axes": 2 if weights.form == "cols" else 1, "parts": weights.learners if top else 1}


def linear(x_TD: Tensor, w_OD: Tensor, s_O: Tensor, parts: int = 1) -> Tensor:
    """x w^T of float32 tokens and integers with their scales; rows of x are quantised in so many equal parts."""
    return (int4 if w_OD.dtype == torch.uint8 else int8).linear(x_TD, w_OD, s_O, parts)


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
