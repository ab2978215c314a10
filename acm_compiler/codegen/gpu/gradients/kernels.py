"""The kernels of the backward beside those of the forward, over tokens sorted by k; sums have a fixed order.

hidden:   of a plain MLP with fixed choices: h, what reaches it before its activation, and biases, in parts
branches: of others, or of products that were kept: what reaches branches, and h; what reaches a relaxed choice
weights:  dW = left.T right, over the tokens that run a weight's learner, in parts that are added up afterwards
sums:     of rows, over the tokens of each k, in parts, too: gradients of biases
total:    parts added up
biases:   the parts that hidden left, added up
"""

from __future__ import annotations

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import activate, derive
from acm_compiler.codegen.gpu.blocks import (
    find_band,
    load_block,
    load_rows,
    load_weights,
    multiply,
    raster,
    row_pointers,
)
from acm_compiler.codegen.gpu.layers import add_bias, zero_beyond_k


@triton.jit(do_not_specialize=["T"])
def hidden_kernel(
    h, reached, sums, x, w_in, b_in, dy, w_out, counts, T, D_IN, D_OUT,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    X_DESC: tl.constexpr, IN_DESC: tl.constexpr, DY_DESC: tl.constexpr, OUT_DESC: tl.constexpr,
    EVEN_IN: tl.constexpr, EVEN_OUT: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """h = act(x W_in + b_in) and `reached` = dy W_out act', both [T, ROW], in sorted order as x and dy are.

    They hold what tokens run, and zeros behind that in the same tile. w_in [N * H, D_IN], w_out [D_OUT, N * H].
    sums [row tiles, N * H]: `reached` summed over the rows of each tile, fp32.
    """
    _, _, _, _, _, _, _, tiles = find_band(0, counts, N, 1, N, H, 0, False, BM, BN)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _, local, first, high, wide, _, _, _ = find_band(tile, counts, N, 1, N, H, 0, False, BM, BN)
        row_tile, column_tile = raster(local, high, wide, GROUP)
        m0 = (first + row_tile) * BM
        n0 = column_tile * BN
        rows = m0 + tl.arange(0, BM)
        columns = n0 + tl.arange(0, BN)
        source = tl.minimum(rows, T - 1)
        x_at = x if X_DESC else row_pointers(x, source, D_IN, BK)
        in_at = w_in if IN_DESC else row_pointers(w_in, tl.minimum(columns, N * H - 1), D_IN, BK)
        dy_at = dy if DY_DESC else row_pointers(dy, source, D_OUT, BK)
        before = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D_IN, BK):
            a = load_block(x, x_at, m0, k, D_IN, X_DESC, EVEN_IN, BK)
            b = load_weights(w_in, in_at, n0, k, D_IN, N * H, N * H, False, IN_DESC, EVEN_IN, BN, BK)
            before = multiply(a, b, before, PRECISION, INTERPRET)
        of_h = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D_OUT, BK):
            a = load_block(dy, dy_at, m0, k, D_OUT, DY_DESC, EVEN_OUT, BK)
            b = load_weights(w_out, w_out, n0, k, D_OUT, N * H, N * H, True, OUT_DESC, EVEN_OUT, BN, BK)
            of_h = multiply(a, b, of_h, PRECISION, INTERPRET)
        if BIAS:
            before = add_bias(before, b_in, columns, N * H)
        at = rows.to(tl.int64)[:, None] * ROW + columns[None, :]
        real = (rows < T)[:, None] & (columns < ROW)[None, :]
        value, of_first = activate(before, ACT, SHORT, INTERPRET), of_h * derive(before, ACT, SHORT, INTERPRET)
        value = zero_beyond_k(value, rows, columns, counts, m0 + BM, n0 + BN, N, H)
        tl.store(h + at, value.to(h.dtype.element_ty), mask=real)
        of_first = zero_beyond_k(of_first, rows, columns, counts, m0 + BM, n0 + BN, N, H)
        tl.store(reached + at, of_first.to(reached.dtype.element_ty), mask=real)
        if BIAS:
            at = sums + (first + row_tile).to(tl.int64) * (N * H) + columns
            tl.store(at, tl.sum(of_first, 0), mask=columns < N * H)


@triton.jit
def biases_kernel(
    total, sums, counts,
    N: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """total [N * H]: sums [row tiles, N * H] of the tiles of ROWS tokens that run a learner, in their order."""
    n = tl.program_id(0) % N
    columns = tl.program_id(0) // N * BN + tl.arange(0, BN)
    end = (tl.load(counts + n + 1) + ROWS - 1) // ROWS
    acc = tl.zeros((BK, BN), tl.float32)
    for first in range(0, end, BK):
        rows = first + tl.arange(0, BK)
        at = sums + rows.to(tl.int64)[:, None] * (N * H) + (n * H + columns)[None, :]
        acc += tl.load(at, mask=(rows < end)[:, None] & (columns < H)[None, :], other=0.0)
    tl.store(total + n * H + columns, tl.sum(acc, 0).to(total.dtype.element_ty), mask=columns < H)


@triton.jit(do_not_specialize=["T"])
def branches_kernel(
    of_first, of_up, h, first, up, dh, reach, counts, T,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, ACT: tl.constexpr, EVERY: tl.constexpr, SHORT: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of the first layer's products, and h, from the products and dh; all [T, ROW] in sorted order.

    first: of the activated branch, up: of the other; without them, of_first and of_up hold them, and h holds dh; h:
    None where it is known. reach [T, N]: sums of h dh over each learner, fp32. A program has rows of one learner. What
    runs no such learner is left, or, where EVERY learner was computed for every token, summed and then zero.
    """
    n = tl.program_id(0) % N
    rows = tl.program_id(0) // N * BM + tl.arange(0, BM)
    runs = rows < tl.load(counts + n + 1)
    real = runs
    if EVERY:
        real = rows < T
    if first is None:
        first = of_first
        up = of_up
        dh = h
    total = tl.zeros((BM,), tl.float32)
    for start in range(0, H, BN):
        columns = start + tl.arange(0, BN)
        mask = real[:, None] & (columns < H)[None, :]
        at = rows.to(tl.int64)[:, None] * ROW + (n * H + columns)[None, :]
        before = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
        of_h = tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        value, reached = activate(before, ACT, SHORT, INTERPRET), of_h * derive(before, ACT, SHORT, INTERPRET)
        if of_up is not None:
            other = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
            of_other = of_h * value
            if EVERY:
                of_other = tl.where(runs[:, None], of_other, 0.0)
            tl.store(of_up + at, of_other.to(up.dtype.element_ty), mask=mask)
            value *= other
            reached *= other
        if EVERY:
            total += tl.sum(tl.where(mask, value * of_h, 0.0), 1)
            value = tl.where(runs[:, None], value, 0.0)
            reached = tl.where(runs[:, None], reached, 0.0)
        tl.store(of_first + at, reached.to(first.dtype.element_ty), mask=mask)
        if h is not None:
            tl.store(h + at, value.to(dh.dtype.element_ty), mask=mask)
    if EVERY:
        tl.store(reach + rows.to(tl.int64) * N + n, total, mask=real)


@triton.jit
def _add_rows(acc, left, right, first, end, m0, n0, WIDE, M: tl.constexpr, ROW: tl.constexpr, TURNED: tl.constexpr,
              CUT: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """acc + left.T right of BK rows, fewer where they are CUT, in fp32; TURNED: right.T left."""
    a = load_rows(left, first, end, m0, ROW, M, CUT, DESC, BK, BM)
    b = load_rows(right, first, end, n0, WIDE, WIDE, CUT, DESC, BK, BN)
    if TURNED:
        a, b = b, a
    if INTERPRET:  # the interpreter's dot takes bf16 for its bit pattern
        return tl.dot(tl.trans(a.to(tl.float32)), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)


@triton.jit
def weights_kernel(
    parts, left, right, counts, WIDE,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, SPLIT: tl.constexpr, TURNED: tl.constexpr,
    DESC: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """parts [SPLIT, N * H, WIDE], or TURNED [SPLIT, WIDE, N * H]: sums over tokens.

    left [T, ROW] and right [T, WIDE] in sorted order, DESC: by descriptors of blocks [BK, BM] and [BK, BN]. What no
    token runs may hold anything. A part is the same tokens in every run.
    """
    M: tl.constexpr = N * H
    part = tl.program_id(0) % SPLIT
    tile = tl.program_id(0) // SPLIT
    across = (WIDE + BN - 1) // BN
    m0 = tile // across * BM
    n0 = tile % across * BN
    fewest, most = m0 // H + 1, tl.minimum(m0 + BM - 1, M - 1) // H + 1  # k that run the tile's first learner, and all
    length = ((tl.load(counts + fewest) + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    acc = tl.zeros((BN, BM) if TURNED else (BM, BN), tl.float32)
    for q in range(fewest, most + 1):
        begin = tl.maximum(tl.load(counts + q + 1, mask=q < most, other=0), part * length)
        end = tl.minimum(tl.load(counts + q), (part + 1) * length)
        whole = begin + tl.maximum(end - begin, 0) // BK * BK
        for first in range(begin, whole, BK):
            acc = _add_rows(acc, left, right, first, end, m0, n0, WIDE, M, ROW, TURNED, False, DESC, PRECISION,
                            INTERPRET, BM, BN, BK)  # fmt: skip
        if whole < end:
            acc = _add_rows(acc, left, right, whole, end, m0, n0, WIDE, M, ROW, TURNED, True, DESC, PRECISION,
                            INTERPRET, BM, BN, BK)  # fmt: skip
        if H % BM != 0 and q < most:  # values of learners beyond q are zero, but times NaN or infinity, or not written
            runs = m0 + tl.arange(0, BM) < q * H
            acc = tl.where(runs[None, :] if TURNED else runs[:, None], acc, 0.0)
    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    at = parts + part.to(tl.int64) * M * WIDE
    if TURNED:
        at += n.to(tl.int64)[:, None] * M + m[None, :]
        real = (n < WIDE)[:, None] & (m < M)[None, :]
    else:
        at += m.to(tl.int64)[:, None] * WIDE + n[None, :]
        real = (m < M)[:, None] & (n < WIDE)[None, :]
    tl.store(at, acc.to(parts.dtype.element_ty), mask=real)


@triton.jit
def sums_kernel(
    parts, rows_in, perm, counts, WIDE, stride,
    N: tl.constexpr, PER_K: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """parts [SPLIT, N + 1, WIDE] fp32: sums of rows [T, WIDE] over the tokens of each k.

    rows_in in token order, or, without perm, in sorted order, of which rows hold PER_K * k numbers.
    """
    part = tl.program_id(0) % SPLIT
    q = tl.program_id(0) // SPLIT % (N + 1)
    n = tl.program_id(0) // (SPLIT * (N + 1)) * BN + tl.arange(0, BN)
    band = tl.load(counts + q + 1, mask=q < N, other=0)
    run = tl.load(counts + q)
    length = ((run - band + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    end = tl.minimum(run, band + (part + 1) * length)
    here = n < WIDE
    if perm is None:
        here = n < q * PER_K
    acc = tl.zeros((BK, BN), tl.float32)
    for first in range(band + part * length, end, BK):
        rows = first + tl.arange(0, BK)
        source = rows
        if perm is not None:
            source = tl.load(perm + rows, mask=rows < end, other=0)
        at = rows_in + source.to(tl.int64)[:, None] * stride + n[None, :]
        acc += tl.load(at, mask=(rows < end)[:, None] & here[None, :], other=0.0).to(tl.float32)
    tl.store(parts + (part * (N + 1) + q).to(tl.int64) * WIDE + n, tl.sum(acc, 0), mask=n < WIDE)


@triton.jit
def total_kernel(total, parts, PARTS: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr):
    """total [SIZE]: parts [PARTS, SIZE] fp32, added up in their order."""
    at = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for part in range(PARTS):
        acc += tl.load(parts + tl.cast(part, tl.int64) * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(total + at, acc.to(total.dtype.element_ty), mask=at < SIZE)
