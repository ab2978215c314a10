"""Products of int8 weights with activations that are quantised as they come (docs/semantics.md, Int8 learners).

A weight is q s: q in [-127, 127], one scale s per output channel. A row of activations is (q - z) s: q in [0, 255],
and a scale and a zero point z of its own, so that a token's output depends on that token alone. Sums of products are
integers and exact; all else is float32. Where a layer reads what several learners made, each learner's part of a row
is a row of its own: what k learners give does not depend on those that come after them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DEEPEST = (2**31 - 1) // (255 * 127)
"""The longest row whose sums fit into 32 bits."""

_LEAST = 2.0**-100  # a row of a smaller scale counts as zeros: the scale's reciprocal must be finite
# sums of so many products stay below 2^24, so that floats hold them exactly, in whatever order they are added
_EXACT = 2**24 // (255 * 127)


class Rows(NamedTuple):
    """Quantised rows: whole numbers q [..., D], as floats, zero points [..., 1], and scales [..., 1].

    The scale of a row that is not finite is NaN, whatever its numbers are.
    """

    q: Tensor
    zero: Tensor
    scale: Tensor


def quantize_rows(x: Tensor) -> Rows:
    """Quantise every row of float32 values [..., D] by its own range, which always includes zero."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale.isfinite(), torch.where(scale >= _LEAST, scale, 0.0), torch.nan)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    zero = (-low * inverse).round()
    return Rows((x * inverse).round().add(zero).clamp(0, 255), zero, scale)


def quantize_weight(w: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(int8 values, float32 scales) of a weight whose axes `axes` are summed over; scales have the others."""
    w = w.detach().float()
    scale = w.abs().amax(axes, keepdim=True) / 127
    scale = torch.where(scale < _LEAST, 0.0, scale)
    q = torch.where(scale > 0, w / scale, 0.0).round().clamp(-127, 127)
    return q.nan_to_num().to(torch.int8), scale.squeeze(axes)


def dequantize_weight(q: Tensor, scale: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The float32 numbers that int8 values stand for; `axes` as when they were quantised."""
    for axis in sorted(axis % q.dim() for axis in axes):
        scale = scale.unsqueeze(axis)
    return q * scale


def linear(x_TD: Tensor, w_OD: Tensor, s_O: Tensor, parts: int = 1) -> Tensor:
    """x w^T of float32 tokens and an int8 weight; rows of x are quantised in so many equal parts."""
    rows = quantize_rows(x_TD.unflatten(-1, (parts, -1)))
    y_TO = x_TD.new_zeros(x_TD.shape[0], w_OD.shape[0])
    for q_TD, zero_T1, scale_T1, piece_OD in zip(*(t.unbind(-2) for t in rows), w_OD.chunk(parts, -1), strict=True):
        y_TO = torch.addcmul(y_TO, _sums(q_TD, zero_T1, piece_OD).float(), scale_T1)
    return y_TO * s_O


def _sums(q_TD: Tensor, zero_T1: Tensor, w_OD: Tensor) -> Tensor:
    """(q - z) w^T, exact, int32 [T, O]."""
    if len(q_TD) and w_OD.shape[1] > 1 and _has_products(w_OD):  # torch's are wrong for one column read transposed
        # 128 less, for signed bytes; a row of ones gives what that takes away
        signed = F.pad((q_TD - 128).to(torch.int8), (0, 0, 1, 0), value=1)
        total_TO = torch._int_mm(signed, w_OD.t())
        return torch.addcmul(total_TO[1:], (128 - zero_T1).to(torch.int32), total_TO[0])
    total_TO = torch.zeros(len(q_TD), len(w_OD), dtype=torch.int32, device=w_OD.device)
    for x, w in zip((q_TD - zero_T1).split(_EXACT, -1), w_OD.split(_EXACT, -1), strict=True):
        total_TO += F.linear(x, w.float()).to(torch.int32)
    return total_TO


def _has_products(w_OD: Tensor) -> bool:
    """True if torch has fast products of bytes here; a counter of operations is shown others, which it knows."""
    fast = w_OD.device.type == "cpu" and _cpu_has_products()
    return fast and (torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack())


@lru_cache
def _cpu_has_products() -> bool:
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()
