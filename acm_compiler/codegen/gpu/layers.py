"""The two layers of the learners, each output element written once, so bitwise repeatable.

first:  h = act(x W_in + b_in), for the learners that each token runs, and exact zeros behind them
second: y = W_out h + b_out(k) + residual; also for sites without a hidden layer: slices, and the dense weight at k = N
"""

from __future__ import annotations

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import activate
from acm_compiler.codegen.gpu.blocks import (
    find_band,
    k_of_rows,
    load_block,
    load_weights,
    multiply,
    raster,
    row_pointers,
)


@triton.jit
def add_bias(acc, bias, columns, HIDDEN: tl.constexpr):
    """acc and the bias of its columns, [HIDDEN]."""
    return acc + tl.load(bias + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)[None, :]


@triton.jit
def zero_beyond_k(
    value, rows, columns, counts, last_row, last_column, N: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Zeros where column >= k * H; nothing to do for tiles whose every row runs the tile's last learner."""
    last = tl.minimum((last_column + H - 1) // H, N)
    if (last_row > tl.load(counts + last)) | (last_column > N * H):
        k = k_of_rows(rows, counts, N)
        value = tl.where(columns[None, :] < (k * H)[:, None], value, 0.0)
    return value


@triton.jit
def _write_hidden(
    h, before, before_up, acc, up, b_in, b_up, rows, columns, counts, last_row, last_column, T,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    SHORT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Write h of a tile's sums, and what is before activations where that is kept."""
    at = rows.to(tl.int64)[:, None] * ROW + columns[None, :]
    real = (rows < T)[:, None] & (columns < ROW)[None, :]
    if BIAS:
        acc = add_bias(acc, b_in, columns, N * H)
    if before is not None:
        tl.store(before + at, acc.to(h.dtype.element_ty), mask=real)
    value = activate(acc, ACT, SHORT, INTERPRET)
    if GATED:
        if BIAS:
            up = add_bias(up, b_up, columns, N * H)
        if before_up is not None:
            tl.store(before_up + at, up.to(h.dtype.element_ty), mask=real)
        value *= up
    value = zero_beyond_k(value, rows, columns, counts, last_row, last_column, N, H)
    tl.store(h + at, value.to(h.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["T"])
def layer1_kernel(
    h, before, before_up, x, w_in, b_in, w_up, b_up, perm, counts, T, D_IN, stride_x,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, Q_HI: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, GATHER: tl.constexpr, X_DESC: tl.constexpr, W_DESC: tl.constexpr,
    TURNED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """h [T, ROW] in sorted order; x [T, D_IN] in token order (GATHER) or sorted; w_in, w_up [N * H, D_IN], or TURNED.

    before, before_up: None, or of the same shape: both branches' products and biases, as a backward reads them.
    Bands Q_HI to 1. X_DESC, W_DESC: x, the weights are tensor descriptors of blocks [BM, BK], [BN, BK] (or TURNED).
    """
    _, _, _, _, _, _, _, tiles = find_band(0, counts, Q_HI, 1, N, H, 0, False, BM, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT):
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
        in_at = w_in if W_DESC or TURNED else row_pointers(w_in, weight_rows, D_IN, BK)
        up_at = w_up if W_DESC or TURNED or not GATED else row_pointers(w_up, weight_rows, D_IN, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D_IN, BK):
            a = load_block(x, a_at, m0, k, D_IN, X_DESC, EVEN, BK)
            b = load_weights(w_in, in_at, n0, k, D_IN, N * H, N * H, TURNED, W_DESC, EVEN, BN, BK)
            acc = multiply(a, b, acc, PRECISION, INTERPRET)
            if GATED:
                b = load_weights(w_up, up_at, n0, k, D_IN, N * H, N * H, TURNED, W_DESC, EVEN, BN, BK)
                up = multiply(a, b, up, PRECISION, INTERPRET)
        _write_hidden(
            h, before, before_up, acc, up, b_in, b_up, rows, columns, counts, m0 + BM, n0 + BN, T, N, H, ROW, ACT,
            GATED, BIAS, SHORT, INTERPRET,
        )  # fmt: skip


@triton.jit
def interleaved(index, N: tl.constexpr, H: tl.constexpr, HEAD: tl.constexpr):
    """Place of feature `index`, counted learner by learner (N x heads x HEAD), in a tensor of heads x N x HEAD."""
    return (index % H) // HEAD * (N * HEAD) + index // H * HEAD + index % HEAD


@triton.jit
def add_bias_of_rows(acc, b_out, rows, columns, counts, last, q, N: tl.constexpr, D_OUT: tl.constexpr):
    """acc and b_out(k) of every row, of which row `last` has the least k, and q is the largest.

    One row of b_out at a time, as registers are few; nearly all tiles have but one.
    """
    k = k_of_rows(rows, counts, N)
    for n in range(k_of_rows(last, counts, N), q + 1):
        one = tl.load(b_out + n * D_OUT + columns, mask=columns < D_OUT, other=0.0).to(tl.float32)
        acc += tl.where((k == n)[:, None], one[None, :], 0.0)
    return acc


@triton.jit
def _reduction(q, n0, D_IN, H: tl.constexpr, REDUCE: tl.constexpr):
    """Number of columns of `a` that a tile of band q needs."""
    if REDUCE == "all":
        return D_IN
    elif REDUCE == "rows":
        return tl.where(n0 < q * H, D_IN, 0)
    else:
        return q * H


@triton.jit
def _sum_of_slices(
    acc, a_rows, w, columns, length, N: tl.constexpr, H: tl.constexpr, HEAD: tl.constexpr, D_OUT: tl.constexpr,
    SORTED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + sum of x_n W_n.T over the slices of x; w [N, D_OUT, H]. SORTED: slices of x lie learner by learner."""
    for k in range(0, length, BK):
        index = k + tl.arange(0, BK)
        source = index if SORTED else interleaved(index, N, H, HEAD)
        w_at = w + (columns.to(tl.int64) * H)[:, None] + (index // H * (D_OUT * H) + index % H)[None, :]
        if EVEN:
            left = tl.load(a_rows[:, None] + source[None, :])
            right = tl.load(w_at)
        else:
            real = (index < length)[None, :]
            left = tl.load(a_rows[:, None] + source[None, :], mask=real, other=0.0)
            right = tl.load(w_at, mask=real, other=0.0)
        acc = multiply(left, right, acc, PRECISION, INTERPRET)
    return acc


@triton.jit
def _finish(
    y, acc, b_out, residual, token, mine, columns, q, stride_r,
    N: tl.constexpr, H: tl.constexpr, HEAD: tl.constexpr, D_OUT: tl.constexpr, OWN: tl.constexpr,
    REDUCE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add what is missing and write each element once."""
    to_write = mine[:, None] & (columns < D_OUT)[None, :]
    target = columns
    if REDUCE == "rows":
        acc = tl.where((columns < q * H)[None, :], acc, 0.0)
        target = interleaved(columns, N, H, HEAD)
    if OWN:
        acc += tl.load(b_out + q * D_OUT + target, mask=columns < D_OUT, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        at = residual + token[:, None] * stride_r + target[None, :]
        acc += tl.load(at, mask=to_write, other=0.0).to(tl.float32)
    tl.store(y + token[:, None] * D_OUT + target[None, :], acc.to(y.dtype.element_ty), mask=to_write)


@triton.jit(do_not_specialize=["T"])
def layer2_kernel(
    y, a, w, b_out, residual, perm, counts, T, D_IN, stride_a, stride_w, stride_r,
    N: tl.constexpr, H: tl.constexpr, HEAD: tl.constexpr, D_OUT: tl.constexpr, Q_HI: tl.constexpr,
    Q_LO: tl.constexpr, OWN: tl.constexpr, REDUCE: tl.constexpr, STACKED: tl.constexpr, RESIDUAL: tl.constexpr,
    GATHER: tl.constexpr, A_DESC: tl.constexpr, W_DESC: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """y [T, D_OUT] in token order for tokens with k in [Q_LO, Q_HI]; a in sorted order, or in token order (GATHER).

    w [D_OUT, reduction], or TURNED, or STACKED: one such matrix per k. OWN: no tile serves two k.
    REDUCE "learners": k * H columns of a; "all": D_IN; "rows": D_IN for output rows of the first k learners; "cols":
    k * H columns of x, which lie apart, against w [N, D_OUT, H]. b_out may be absent where not OWN.
    """
    _, _, _, _, _, _, _, tiles = find_band(0, counts, Q_HI, Q_LO, N, 0, D_OUT, OWN, BM, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT):
        q, local, first, high, wide, lo, hi, _ = find_band(tile, counts, Q_HI, Q_LO, N, 0, D_OUT, OWN, BM, BN)
        row_tile, column_tile = raster(local, high, wide, GROUP)
        m0 = (first + row_tile) * BM
        n0 = column_tile * BN
        rows = m0 + tl.arange(0, BM)
        columns = n0 + tl.arange(0, BN)
        mine = (rows >= lo) & (rows < hi)
        token = tl.load(perm + rows, mask=mine, other=0).to(tl.int64)
        source = token if GATHER else tl.minimum(rows, T - 1).to(tl.int64)
        w_rows = tl.minimum(columns, D_OUT - 1)
        acc = tl.zeros(
            (BM, BN), tl.float32
        )  # a sum that began with loaded values would have products wait for each other
        length = _reduction(q, n0, D_IN, H, REDUCE)
        if REDUCE == "cols":
            acc = _sum_of_slices(
                acc, a + source * stride_a, w, w_rows, length, N, H, HEAD, D_OUT, not GATHER, EVEN, PRECISION,
                INTERPRET, BK,
            )  # fmt: skip
        else:
            above = (q - 1) * D_OUT if STACKED else 0
            a_at = a if A_DESC else row_pointers(a, source, stride_a, BK)
            w_at = w if W_DESC or TURNED else row_pointers(w, above + w_rows, stride_w, BK)
            for k in range(0, length, BK):
                left = load_block(a, a_at, m0, k, length, A_DESC, EVEN, BK)
                right = load_weights(
                    w, w_at, above + n0, k, length, stride_w, D_OUT, TURNED, W_DESC, EVEN, BN, BK
                )  # fmt: skip
                acc = multiply(left, right, acc, PRECISION, INTERPRET)
        if not (OWN or b_out is None):
            acc = add_bias_of_rows(acc, b_out, rows, columns, counts, m0 + BM - 1, q, N, D_OUT)
        _finish(y, acc, b_out, residual, token, mine, columns, q, stride_r, N, H, HEAD, D_OUT, OWN, REDUCE, RESIDUAL)
