"""The first layer: h = act(x W_in + b_in), for the learners that each token runs and exact zeros behind them."""

from __future__ import annotations

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import activate
from acm_compiler.codegen.gpu.blocks import find_band, k_of_rows, raster
from acm_compiler.codegen.gpu.products import load_block, multiply, row_pointers


@triton.jit
def _add_bias(acc, bias, columns, HIDDEN: tl.constexpr):
    return acc + tl.load(bias + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _zero_beyond_k(
    value, rows, columns, counts, last_row, last_column, N: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Zeros where column >= k * H; nothing to do for tiles whose every row runs the tile's last learner."""
    last = tl.minimum((last_column + H - 1) // H, N)
    if (last_row > tl.load(counts + last)) | (last_column > N * H):
        k = k_of_rows(rows, counts, N)
        value = tl.where(columns[None, :] < (k * H)[:, None], value, 0.0)
    return value


@triton.jit(do_not_specialize=["T"])
def layer1_kernel(
    h, x, w_in, b_in, w_up, b_up, perm, counts, T, D_IN, stride_x,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, Q_HI: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, GATHER: tl.constexpr, X_DESC: tl.constexpr, W_DESC: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """h [T, ROW] in sorted order; x [T, D_IN] in token order (GATHER) or sorted; w_in, w_up [N * H, D_IN].

    Bands Q_HI to 1. X_DESC, W_DESC: x, the weights are tensor descriptors of blocks [BM, BK], [BN, BK].
    """
    _, _, _, _, _, _, _, tiles = find_band(0, counts, Q_HI, 1, N, H, 0, False, BM, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        _, local, first, high, wide, _, _, _ = find_band(tile, counts, Q_HI, 1, N, H, 0, False, BM, BN)
        row_tile, column_tile = raster(local, high, wide, GROUP)
        m0 = (first + row_tile) * BM
        n0 = column_tile * BN
        rows = m0 + tl.arange(0, BM)
        columns = n0 + tl.arange(0, BN)
        source = tl.minimum(rows, T - 1)
        if GATHER:
            source = tl.load(perm + rows, mask=rows < T, other=0)
        weight_rows = tl.minimum(columns, N * H - 1)
        a_at = x if X_DESC else row_pointers(x, source, stride_x, BK)
        in_at = w_in if W_DESC else row_pointers(w_in, weight_rows, D_IN, BK)
        up_at = w_up if W_DESC or not GATED else row_pointers(w_up, weight_rows, D_IN, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D_IN, BK):
            a = load_block(x, a_at, m0, k, D_IN, X_DESC, EVEN, BK)
            acc = multiply(a, load_block(w_in, in_at, n0, k, D_IN, W_DESC, EVEN, BK), acc, PRECISION, INTERPRET)
            if GATED:
                up = multiply(a, load_block(w_up, up_at, n0, k, D_IN, W_DESC, EVEN, BK), up, PRECISION, INTERPRET)
        value = activate(_add_bias(acc, b_in, columns, N * H) if BIAS else acc, ACT, SHORT, INTERPRET)
        if GATED:
            value *= _add_bias(up, b_up, columns, N * H) if BIAS else up
        value = _zero_beyond_k(value, rows, columns, counts, m0 + BM, n0 + BN, N, H)
        at = h + rows.to(tl.int64)[:, None] * ROW + columns[None, :]
        tl.store(at, value.to(h.dtype.element_ty), mask=(rows < T)[:, None] & (columns < ROW)[None, :])
