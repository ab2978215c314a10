"""Rows as layers read them, where they are not read where they lie: in sorted order, normalised, or both."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.options import kernel_options

_ELEMENTS = 4096  # of a program: with them its registers hold whole rows
_ROWS = 4
_WIDE = 8192


@triton.jit
def _normalised(value, here, weight, bias, eps, columns, D_IN: tl.constexpr):
    """LayerNorm of whole rows [BM, PADDED], fp32; the rounded mean is mended, for rows far from zero."""
    off = tl.where(here, value - (tl.sum(value, 1) / D_IN)[:, None], 0.0)
    off = tl.where(here, off - (tl.sum(off, 1) / D_IN)[:, None], 0.0)
    y = off * tl.rsqrt(tl.sum(off * off, 1) / D_IN + eps)[:, None]
    if weight is not None:
        y *= tl.load(weight + columns, mask=columns < D_IN, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        y += tl.load(bias + columns, mask=columns < D_IN, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["T", "eps"])
def permute_kernel(
    rows_out, x, perm, counts, norm_weight, norm_bias, T, stride_x, eps,
    D_IN: tl.constexpr, PADDED: tl.constexpr, SORTED: tl.constexpr, NORM: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """rows_out [T, D_IN] = x[perm] (SORTED: what runs no learner is left out) or x, with NORM normalised."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, PADDED)
    if SORTED:
        mine = rows < tl.load(counts + 1)
        token = tl.load(perm + rows, mask=mine, other=0).to(tl.int64)
    else:
        mine = rows < T
        token = rows.to(tl.int64)
    here = (columns < D_IN)[None, :]
    real = mine[:, None] & here
    value = tl.load(x + token[:, None] * stride_x + columns[None, :], mask=real, other=0.0)
    if NORM:
        value = _normalised(value.to(tl.float32), here, norm_weight, norm_bias, eps, columns, D_IN)
    at = rows_out + rows.to(tl.int64)[:, None] * D_IN + columns[None, :]
    tl.store(at, value.to(rows_out.dtype.element_ty), mask=real)


def permute_constants(d_in: int, *, in_order: bool, norm: bool) -> dict[str, Any]:
    """Constants of `permute_kernel`; in_order: rows are sorted."""
    padded = triton.next_power_of_2(d_in)
    rows = max(1, min(_ROWS, _ELEMENTS // padded)) if norm else _ROWS
    return {"D_IN": d_in, "PADDED": padded, "SORTED": in_order, "NORM": norm, "BM": rows}


def permute_options(d_in: int) -> dict[str, int]:
    """Warps: enough to hold a row in registers."""
    return kernel_options(warps=4 if d_in <= _WIDE else 16)
