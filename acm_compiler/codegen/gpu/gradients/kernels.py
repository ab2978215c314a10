"""The products of the backward, over tokens sorted by k; every element is written once, and sums have a fixed order.

hidden:  h and what reaches the branches, of the learners that each token runs (EVERY: and what reaches the choice)
tokens:  dx, from what reaches the branches
weights: dW = left.T right, over the tokens that run a weight's learner, in parts that are added up afterwards
bias:    db_out, sums of dy over the tokens of each k, in parts, too
"""

from __future__ import annotations

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import activate, derive
from acm_compiler.codegen.gpu.blocks import find_band, k_of_rows, multiply, raster


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + a @ b in fp32."""
    if INTERPRET:  # the interpreter's dot takes bf16 for its bit pattern
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _block(source, rows, stride, columns, real_rows, real_columns):
    """Elements [rows, columns] of a matrix; zeros where they are not real."""
    at = source + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(at, mask=real_rows[:, None] & real_columns[None, :], other=0.0)


@triton.jit
def _branch(x, token, stride_x, real, w, b, columns, inside, D_IN, BIAS: tl.constexpr, PRECISION: tl.constexpr,
            INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """x W.T + b of a block of tokens and columns, fp32."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D_IN, BK):
        depth = k + tl.arange(0, BK)
        left = _block(x, token, stride_x, depth, real, depth < D_IN)
        acc = multiply(left, _block(w, columns, D_IN, depth, inside, depth < D_IN), acc, PRECISION, INTERPRET)
    if BIAS:
        acc += tl.load(b + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _reach(reach, p, rows, real, columns, n0, tile, N: tl.constexpr, H: tl.constexpr, TILES: tl.constexpr,
           BN: tl.constexpr):  # fmt: skip
    """Sums of p over each learner's columns in this tile, into reach [T, TILES, N]."""
    for n in tl.static_range(N):
        if (n * H < n0 + BN) & ((n + 1) * H > n0):
            mine = (columns >= n * H) & (columns < (n + 1) * H)
            total = tl.sum(tl.where(mine[None, :], p, 0.0), 1)
            tl.store(reach + (rows.to(tl.int64) * TILES + tile) * N + n, total, mask=real)


@triton.jit(do_not_specialize=["T"])
def hidden_kernel(
    h, da, dup, reach, x, dy, w_in, b_in, w_up, b_up, w_out, perm, counts, T, D_IN, stride_x, stride_y,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, D_OUT: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, EVERY: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """h, da, dup [T, ROW] in sorted order, zeros beyond a token's k; reach [T, tiles of columns, N]."""
    WIDE: tl.constexpr = (N * H + BN - 1) // BN
    if EVERY:
        tiles = (T + BM - 1) // BM * WIDE
    else:
        _, _, _, _, _, _, _, tiles = find_band(0, counts, N, 1, N, H, 0, False, BM, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        if EVERY:
            row_tile, column_tile = raster(tile, (T + BM - 1) // BM, WIDE, GROUP)
        else:
            _, local, first, high, wide, _, _, _ = find_band(tile, counts, N, 1, N, H, 0, False, BM, BN)
            row_tile, column_tile = raster(local, high, wide, GROUP)
            row_tile += first
        n0 = column_tile * BN
        rows = row_tile * BM + tl.arange(0, BM)
        columns = n0 + tl.arange(0, BN)
        real, inside = rows < T, columns < N * H
        token = tl.load(perm + rows, mask=real, other=0)
        a = _branch(x, token, stride_x, real, w_in, b_in, columns, inside, D_IN, BIAS, PRECISION, INTERPRET, BM, BN, BK)
        dh = tl.zeros((BM, BN), tl.float32)
        for o in range(0, D_OUT, BK):
            depth = o + tl.arange(0, BK)
            left = _block(dy, token, stride_y, depth, real, depth < D_OUT)
            dh = _dot(left, _block(w_out, depth, N * H, columns, depth < D_OUT, inside), dh, PRECISION, INTERPRET)
        value, reached = activate(a, ACT, SHORT, INTERPRET), dh * derive(a, ACT)
        runs = columns[None, :] < (k_of_rows(rows, counts, N) * H)[:, None]
        at = rows.to(tl.int64)[:, None] * ROW + columns[None, :]
        mask = real[:, None] & (columns < ROW)[None, :]
        if GATED:
            up = _branch(
                x, token, stride_x, real, w_up, b_up, columns, inside, D_IN, BIAS, PRECISION, INTERPRET, BM, BN, BK
            )  # fmt: skip
            tl.store(dup + at, tl.where(runs, dh * value, 0.0).to(dup.dtype.element_ty), mask=mask)
            value *= up
            reached *= up
        if EVERY:
            _reach(reach, value * dh, rows, real, columns, n0, column_tile, N, H, WIDE, BN)
        tl.store(h + at, tl.where(runs, value, 0.0).to(h.dtype.element_ty), mask=mask)
        tl.store(da + at, tl.where(runs, reached, 0.0).to(da.dtype.element_ty), mask=mask)


@triton.jit
def _back(acc, da, rows, real, w, columns, inside, length, D_IN, ROW: tl.constexpr, PRECISION: tl.constexpr,
          INTERPRET: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """acc + da W over the first `length` hidden values."""
    for m in range(0, length, BK):
        depth = m + tl.arange(0, BK)
        left = _block(da, rows, ROW, depth, real, depth < length)
        acc = _dot(left, _block(w, depth, D_IN, columns, depth < length, inside), acc, PRECISION, INTERPRET)
    return acc


@triton.jit(do_not_specialize=["T"])
def tokens_kernel(
    dx, da, dup, w_in, w_up, perm, counts, T, D_IN,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dx [T, D_IN] in token order; WIDTH is D_IN. Zeros for tokens that run no learner."""
    _, _, _, _, _, _, _, tiles = find_band(0, counts, N, 0, N, 0, WIDTH, False, BM, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        q, local, first, high, wide, _, _, _ = find_band(tile, counts, N, 0, N, 0, WIDTH, False, BM, BN)
        row_tile, column_tile = raster(local, high, wide, GROUP)
        rows = (first + row_tile) * BM + tl.arange(0, BM)
        columns = column_tile * BN + tl.arange(0, BN)
        real, inside = rows < T, columns < D_IN
        acc = tl.zeros((BM, BN), tl.float32)
        acc = _back(acc, da, rows, real, w_in, columns, inside, q * H, D_IN, ROW, PRECISION, INTERPRET, BK)
        if GATED:
            acc = _back(acc, dup, rows, real, w_up, columns, inside, q * H, D_IN, ROW, PRECISION, INTERPRET, BK)
        token = tl.load(perm + rows, mask=real, other=0).to(tl.int64)
        at = dx + token[:, None] * D_IN + columns[None, :]
        tl.store(at, acc.to(dx.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def weights_kernel(
    parts, bias, left, right, perm, counts, WIDE, stride_r, stride_m, stride_n,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """parts [SPLIT, N * H * WIDE], at m * stride_m + n * stride_n, and bias [SPLIT, N * H]: fp32 sums over tokens.

    left [T, ROW] in sorted order, right [T, WIDE] in token order. A part is the same tokens in every run.
    """
    M: tl.constexpr = N * H
    part = tl.program_id(0) % SPLIT
    tile = tl.program_id(0) // SPLIT
    across = (WIDE + BN - 1) // BN
    m0 = tile // across * BM
    n0 = tile % across * BN
    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    fewest, most = m0 // H + 1, tl.minimum(m0 + BM - 1, M - 1) // H + 1  # k that run the tile's first learner, and all
    length = ((tl.load(counts + fewest) + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    acc = tl.zeros((BM, BN), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for q in range(fewest, most + 1):
        band = tl.load(counts + q + 1, mask=q < most, other=0)
        end = tl.minimum(tl.load(counts + q), (part + 1) * length)
        for first in range(tl.maximum(band, part * length), end, BK):
            rows = first + tl.arange(0, BK)
            real = rows < end
            token = tl.load(perm + rows, mask=real, other=0)
            a = _block(left, rows, ROW, m, real, m < M)
            acc = _dot(tl.trans(a), _block(right, token, stride_r, n, real, n < WIDE), acc, PRECISION, INTERPRET)
            if BIAS:
                total += tl.sum(a.to(tl.float32), 0)
        # the band's rows of learners beyond q are zero, but times NaN or infinity
        acc = tl.where((m < q * H)[:, None], acc, 0.0)
    at = parts + part.to(tl.int64) * (M * WIDE) + m[:, None] * stride_m + n[None, :] * stride_n
    tl.store(at, acc, mask=(m < M)[:, None] & (n < WIDE)[None, :])
    if BIAS:
        tl.store(bias + part * M + m, total, mask=(m < M) & (n0 == 0))


@triton.jit
def bias_kernel(
    parts, dy, perm, counts, WIDE, stride_y, N: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """parts [SPLIT, N + 1, WIDE] fp32: sums of dy [T, WIDE], in token order, over the tokens of each k."""
    part = tl.program_id(0) % SPLIT
    q = tl.program_id(0) // SPLIT % (N + 1)
    n = tl.program_id(0) // (SPLIT * (N + 1)) * BN + tl.arange(0, BN)
    band = tl.load(counts + q + 1, mask=q < N, other=0)
    run = tl.load(counts + q)
    length = ((run - band + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    end = tl.minimum(run, band + (part + 1) * length)
    acc = tl.zeros((BK, BN), tl.float32)
    for first in range(band + part * length, end, BK):
        rows = first + tl.arange(0, BK)
        token = tl.load(perm + rows, mask=rows < end, other=0)
        acc += _block(dy, token, stride_y, n, rows < end, n < WIDE).to(tl.float32)
    tl.store(parts + (part * (N + 1) + q).to(tl.int64) * WIDE + n, tl.sum(acc, 0), mask=n < WIDE)
