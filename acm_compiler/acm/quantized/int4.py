"""Products of 4-bit weights with activations that are rounded as they come (docs/semantics.md, Int4 learners).

The values that a product sums over fall into groups of 32, none of them of two learners. A weight is s q + m: q in
[0, 15], s and m float16 numbers of its group. A row of activations is rounded by group, too: q s, q in [-127, 127].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Values in a row that share a scale and a least value; the last group of a row may be shorter."""
LEAST = 2.0**-100
"""A group of activations of a smaller scale counts as zeros: the scale's reciprocal must be finite."""


def quantize_weight(w: Tensor, *, axes: int = 1, parts: int = 1) -> tuple[Tensor, Tensor]:
    """(values, scales) of a weight whose last `axes` axes are summed over, in so many equal parts of even length.

    Values are uint8, two in a byte, the earlier one in its low half, so that the last axis is half as long. Scales are
    float16 [..., groups, 2]: s and m of every group.
    """
    inner = w.shape[-axes:]
    grouped = _padded(w.detach().float().flatten(-axes).unflatten(-1, (parts, -1)), mode="replicate")
    low, high = grouped.amin(-1, keepdim=True).half(), grouped.amax(-1, keepdim=True)
    scale = ((high - low.float()) / 15).half()
    q = torch.where(scale > 0, (grouped - low.float()) / scale.float(), 0.0).round().nan_to_num().clamp(0, 15)
    length = inner.numel() // parts
    pairs = q.to(torch.uint8).flatten(-2)[..., :length].flatten(-2).unflatten(-1, (-1, 2))
    values = (pairs[..., 0] | pairs[..., 1] << 4).unflatten(-1, (*inner[:-1], -1))
    return values.contiguous(), torch.cat([scale, low], -1).flatten(-3, -2)


def dequantize_weight(values: Tensor, scales: Tensor, *, axes: int = 1, parts: int = 1) -> Tensor:
    """The float32 numbers that 4-bit values stand for, in the shape that the weight had."""
    inner = (*values.shape[-axes:-1], 2 * values.shape[-1])
    pairs = torch.stack([values & 15, values >> 4], -1).flatten(-axes - 1).unflatten(-1, (parts, -1))
    scale, least = scales.float().unflatten(-2, (parts, -1)).unbind(-1)
    length = pairs.shape[-1]
    q = _padded(pairs.float())
    whole = torch.addcmul(least[..., None], q, scale[..., None]).flatten(-2)[..., :length]
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
