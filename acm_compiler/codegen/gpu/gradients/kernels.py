"""The kernels of the backward beside those of the forward, over tokens sorted by k; sums have a fixed order.

branches: h and what reaches its branches, of their products and what reaches h; what reaches a relaxed choice
weights:  dW = left.T right, over the tokens that run a weight's learner, in parts that are added up afterwards
sums:     of rows, over the tokens of each k, in parts, too: gradients of biases
total:    parts added up
"""

from __future__ import annotations

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import activate, derive
from acm_compiler.codegen.gpu.blocks import load_rows


@triton.jit(do_not_specialize=["T"])
def branches_kernel(
    first, up, dh, reach, counts, T,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, ACT: tl.constexpr, EVERY: tl.constexpr, SHORT: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Products of the first layer become what reaches them, and dh becomes h; all [T, ROW] in sorted order.

    first: of the activated branch, up: of the other, or None. reach [T, N]: sums of h dh over each learner, fp32. A
    program has rows of one learner. What runs no such learner is left, or, where EVERY learner was computed for every
    token, summed and then zero.
    """
    n = tl.program_id(0) % N
    rows = tl.program_id(0) // N * BM + tl.arange(0, BM)
    runs = rows < tl.load(counts + n + 1)
    real = runs
    if EVERY:
        real = rows < T
    total = tl.zeros((BM,), tl.float32)
    for start in range(0, H, BN):
        columns = start + tl.arange(0, BN)
        mask = real[:, None] & (columns < H)[None, :]
        at = rows.to(tl.int64)[:, None] * ROW + (n * H + columns)[None, :]
        before = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
        of_h = tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        value, reached = activate(before, ACT, SHORT, INTERPRET), of_h * derive(before, ACT)
        if up is not None:
            other = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
            of_up = of_h * value
            if EVERY:
                of_up = tl.where(runs[:, None], of_up, 0.0)
            tl.store(up + at, of_up.to(up.dtype.element_ty), mask=mask)
            value *= other
            reached *= other
        if EVERY:
            total += tl.sum(tl.where(mask, value * of_h, 0.0), 1)
            value = tl.where(runs[:, None], value, 0.0)
            reached = tl.where(runs[:, None], reached, 0.0)
        tl.store(first + at, reached.to(first.dtype.element_ty), mask=mask)
        tl.store(dh + at, value.to(dh.dtype.element_ty), mask=mask)
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
        if q < most:  # values of learners beyond q are zero, but times NaN or infinity, or were not written
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
