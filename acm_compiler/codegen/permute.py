"""Rows in sorted order, for layers that read them with bulk copies instead of gathering."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

PERMUTED_ROWS = 4
"""Rows per program."""


@triton.jit(do_not_specialize=["T"])
def permute_kernel(
    sorted_x, x, perm, counts, T, stride_x, D_IN: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """sorted_x [T, D_IN] = x[perm]; rows of tokens that run no learner are left out."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, PADDED)
    mine = rows < tl.load(counts + 1)
    token = tl.load(perm + rows, mask=mine, other=0).to(tl.int64)
    real = mine[:, None] & (columns < D_IN)[None, :]
    value = tl.load(x + token[:, None] * stride_x + columns[None, :], mask=real, other=0.0)
    tl.store(sorted_x + rows.to(tl.int64)[:, None] * D_IN + columns[None, :], value, mask=real)


def permute_constants(d_in: int) -> dict[str, Any]:
    """Constants of `permute_kernel`."""
    return {"D_IN": d_in, "PADDED": triton.next_power_of_2(d_in), "BM": PERMUTED_ROWS}
