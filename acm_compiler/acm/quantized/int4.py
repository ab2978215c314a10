"""Products of 4-bit weights with activations that are rounded as they come (docs/semantics.md, Int4 learners).

The values that a product sums over fall into groups of 32, none of them of two learners. A weight is s q + m: q in
[0, 15], s and m float16 numbers of its group. A row of activations is rounded by group, too: q s, q in [-127, 127].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Values in a row that share a scale and a least value; the last group of a row may be shorter."""
LEAST = 2.0**-100
"""A group of activations of a smaller scale counts as zeros: the scale's reciprocal must be finite."""


class Grids(NamedTuple):
    """The numbers that a group's integers stand for: scale s and least value m [..., groups], both float16 numbers."""

    scale: Tensor
    least: Tensor

    def nearest(self, w: Tensor) -> Tensor:
        """The integers q, as floats, whose q s + m are nearest to w [..., groups, any number]."""
        scale, least = (t[..., None].to(w.dtype) for t in self)
        return torch.where(scale > 0, (w - least) / scale, 0.0).round().nan_to_num().clamp(0, 15)

    def floats(self, q: Tensor) -> Tensor:
        """The numbers q s + m, of q [..., groups, any number]."""
        scale, least = (t[..., None].to(q.dtype) for t in self)
        return torch.addcmul(least, q, scale)


def whole_range(low: Tensor, high: Tensor) -> Grids:
    """16 equal steps from the least value of each group [..., groups] to its greatest, in the type of these."""
    least = low.half().to(low.dtype)
    return Grids(((high - least) / 15).half().to(low.dtype), least)


def quantize_weight(w: Tensor, *, axes: int = 1, parts: int = 1) -> tuple[Tensor, Tensor]:
    """(values, scales) of a weight whose last `axes` axes are summed over, in so many equal parts of even length.

    Values are uint8, two in a byte, the earlier one in its low half, so that the last axis is half as long. Scales are
    float16 [..., groups, 2]: s and m of every group. Every number becomes the nearest that its group can stand for.
    """
    length = w.shape[-axes:].numel() // parts
    grouped = _padded(w.detach().float().flatten(-axes).unflatten(-1, (parts, length)), mode="replicate")
    grids = whole_range(grouped.amin(-1), grouped.amax(-1))
    q = grids.nearest(grouped).flatten(-2)[..., :length]
    return pack(q.reshape(w.shape), Grids(*(t.flatten(-2) for t in grids)))


def pack(q: Tensor, grids: Grids) -> tuple[Tensor, Tensor]:
    """(values, scales) as `quantize_weight` gives them, of integers in the shape of the weight, and their grids."""
    pairs = q.to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous(), torch.stack(grids, -1).half()


def dequantize_weight(values: Tensor, scales: Tensor, *, axes: int = 1, parts: int = 1) -> Tensor:
    """The float32 numbers that 4-bit values stand for, in the shape that the weight had."""
    inner = (*values.shape[-axes:-1], 2 * values.shape[-1])
    pairs = torch.stack([values & 15, values >> 4], -1).flatten(-axes - 1).unflatten(-1, (parts, -1))
    grids = Grids(*scales.float().unflatten(-2, (parts, -1)).unbind(-1))
    whole = grids.floats(_padded(pairs.float())).flatten(-2)[..., : pairs.shape[-1]]
    return whole.flatten(-2).unflatten(-1, inner)


def rounded(x: Tensor) -> Tensor:
    """Rows of activations [..., D], each group rounded to 255 steps of its own; one that is not finite is NaN."""
    groups = _padded(x)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale.isfinite(), torch.where(scale >= LEAST, scale, 0.0), torch.nan)
    q = torch.where(scale > 0, groups * (1 / scale), 0.0).round()
    return (q * scale).flatten(-2)[..., : x.shape[-1]]


def linear(x_TD: Tensor, values_OP: Tensor, scales_OG2: Tensor, parts: int = 1) -> Tensor:
    """x w^T of float32 tokens and a 4-bit weight; rows of both have so many equal parts with groups of their own."""
    w_OD = dequantize_weight(values_OP, scales_OG2, parts=parts)
    return F.linear(rounded(x_TD.unflatten(-1, (parts, -1))).flatten(-2), w_OD)


def _padded(rows: Tensor, mode: str = "constant") -> Tensor:
    """Rows [..., D] as groups [..., G, 32]; behind the end of a row are zeros, or its last value."""
    missing = -rows.shape[-1] % GROUP
    if missing and mode == "replicate":
        rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], -1)
    elif missing:
        rows = F.pad(rows, (0, missing))
    return rows.unflatten(-1, (-1, GROUP))
