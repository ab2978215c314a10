"""Plans that outlive a call, found by the weights and by the kind of call; they go when the weights go.

A plan is kept only if it reads the weights where they lie, so that weights written in place are seen; weights that were
moved elsewhere, or replaced, are not those that it was made for, and another plan is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from acm_compiler.codegen.gpu.stages import BULK_COPY_BYTES
from acm_compiler.codegen.gpu.tiles import bucket_of

ALIGNED = BULK_COPY_BYTES - 1
"""Bits of an address that are zero where bulk copies may begin."""
_MOST = 256  # kinds of calls of one module


class _Kept:
    """Plans of one module: its first weight, which owns them, and the addresses of all."""

    __slots__ = ("addresses", "owner", "plans")

    def __init__(self, weights: Sequence[Tensor | None]) -> None:
        place = id(weights[0])
        self.owner = weakref.ref(weights[0], lambda _: _KEPT.pop(place, None))
        self.addresses = addresses_of(weights)
        self.plans: dict[Hashable, Any] = {}


_KEPT: dict[int, _Kept] = {}  # by the first weight


def find_plan(weights: Sequence[Tensor | None], kind: Hashable) -> Any:
    """The plan that was kept for these very weights and that kind of call; None where there is none."""
    kept = _KEPT.get(id(weights[0]))
    if kept is None or kept.owner() is not weights[0] or kept.addresses != addresses_of(weights):
        return None
    return kept.plans.get(kind)


def keep_plan(weights: Sequence[Tensor | None], kind: Hashable, plan: Any) -> None:
    """Keep a plan, unless it reads copies of the weights."""
    if not all(w is None or (w.is_contiguous() and not w.data_ptr() & ALIGNED) for w in weights):
        return
    kept = _KEPT.get(id(weights[0]))
    if kept is None or kept.owner() is not weights[0] or kept.addresses != addresses_of(weights):
        kept = _KEPT[id(weights[0])] = _Kept(weights)
    if len(kept.plans) >= _MOST:
        kept.plans.clear()
    kept.plans[kind] = plan


def addresses_of(weights: Sequence[Tensor | None]) -> list[int]:
    """The addresses of these tensors, 0 for absent ones."""
    return [0 if w is None else w.data_ptr() for w in weights]


def kind_of_rows(x_TD: Tensor, bucket: int | None = None) -> Hashable:
    """Properties of T rows on which a plan depends: bucket of T, features, type, device, and how they lie in memory.

    None where no plan fits: no tokens, or rows that are not contiguous. bucket: another one than that of the rows.
    """
    if x_TD.ndim != 2 or not x_TD.shape[0] or x_TD.stride(1) != 1:
        return None
    tokens, features = x_TD.shape
    bucket = bucket_of(tokens) if bucket is None else bucket
    return bucket, features, x_TD.stride(0), x_TD.dtype, x_TD.get_device(), x_TD.data_ptr() & ALIGNED


def kind_of_k(k_T: Tensor, tokens: int) -> Hashable:
    """The same of a k per token, None where there is not one for each."""
    if k_T.ndim != 1 or k_T.shape[0] != tokens or not k_T.is_contiguous():
        return None
    return k_T.dtype, k_T.get_device(), k_T.data_ptr() & ALIGNED


def rounding(dtype: torch.dtype) -> bool:
    """True if products of that type are rounded to tf32."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
