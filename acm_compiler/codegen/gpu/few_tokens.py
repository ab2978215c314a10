"""Both layers for a handful of tokens: nothing is sorted, learners that no token runs are not read.

A k outside [0, N] gives NaN for its token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import activate
from acm_compiler.codegen.gpu.blocks import load_block, multiply, row_pointers


@triton.jit
def _bias(bias, columns, real, HERE: tl.constexpr):
    if HERE:
        return tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.zeros_like(columns).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["T"])
def few1_kernel(
    h, x, w_in, b_in, w_up, b_up, k_of, T, D_IN, stride_x,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, Q_HI: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """h [T, ROW], T <= BM, in token order: zeros beyond a token's k * H, nothing beyond the largest.

    Tokens with k > Q_HI need no hidden layer.
    """
    rows = tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    real = columns < N * H
    mine = tl.load(k_of + rows, mask=rows < T, other=0).to(tl.int32)
    end = tl.where(mine > Q_HI, 0, mine) * H
    if tl.program_id(0) * BN < tl.minimum(tl.max(end, 0), N * H):
        w_rows = tl.minimum(columns, N * H - 1)
        a_at = row_pointers(x, tl.minimum(rows, T - 1), stride_x, BK)
        in_at = row_pointers(w_in, w_rows, D_IN, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D_IN, BK):
            a = load_block(x, a_at, 0, k, D_IN, False, EVEN, BK)
            acc = multiply(a, load_block(w_in, in_at, 0, k, D_IN, False, EVEN, BK), acc, PRECISION, INTERPRET)
            if GATED:
                up_at = row_pointers(w_up, w_rows, D_IN, BK)
                up = multiply(a, load_block(w_up, up_at, 0, k, D_IN, False, EVEN, BK), up, PRECISION, INTERPRET)
        value = activate(acc + _bias(b_in, columns, real, BIAS), ACT, SHORT, INTERPRET)
        if GATED:
            value *= up + _bias(b_up, columns, real, BIAS)
        value = tl.where(columns[None, :] < end[:, None], value, 0.0)
        at = h + rows[:, None] * ROW + columns[None, :]
        tl.store(at, value.to(h.dtype.element_ty), mask=(rows < T)[:, None] & real[None, :])


@triton.jit
def _add_product(
    acc, a, w_at, rows, mine, low, high, length, T, stride_a, ALL: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + a W.T over `length` columns, for tokens with k in [low, high] unless for ALL.

    The sum is masked, not the operand, which so never comes from registers.
    """
    a_at = row_pointers(a, tl.minimum(rows, T - 1), stride_a, BK)
    own = acc if ALL else tl.zeros_like(acc)
    for k in range(0, length, BK):
        left = load_block(a, a_at, 0, k, length, False, EVEN, BK)
        right = load_block(a, w_at, 0, k, length, False, EVEN, BK)
        own = multiply(left, right, own, PRECISION, INTERPRET)
    return own if ALL else tl.where(((mine >= low) & (mine <= high))[:, None], acc + own, acc)


@triton.jit
def _length(mine, low, high, H: tl.constexpr):
    """Hidden columns of the largest k in [low, high] that a token runs."""
    return tl.maximum(tl.max(tl.where((mine >= low) & (mine <= high), mine, 0), 0), 0) * H


@triton.jit(do_not_specialize=["T"])
def few2_kernel(
    y, h, w_out, b_out, x, w_top, residual, k_of, T, D_IN, stride_x, stride_r,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, D_OUT: tl.constexpr, SECOND: tl.constexpr,
    FROM_X: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y [T, D_OUT] = h W_out + b_out(k) + residual, T <= BM; w_out [D_OUT, N * H].

    SECOND "top": tokens with k = N take w_top, [D_OUT, N * H] of h or, FROM_X, [D_OUT, D_IN] of x. "per_k": w_out has
    one such matrix per k, of which those that some token needs are read.
    """
    rows = tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.load(k_of + rows, mask=rows < T, other=0).to(tl.int32)
    exists = (mine >= 0) & (mine <= N)
    w_rows = tl.minimum(columns, D_OUT - 1)
    real = (rows < T)[:, None] & (columns < D_OUT)[None, :]
    at = b_out + mine[:, None] * D_OUT + columns[None, :]
    acc = tl.load(at, mask=real & exists[:, None], other=float("nan")).to(tl.float32)
    if SECOND == "per_k":
        for q in range(1, N + 1):
            w_at = row_pointers(w_out, (q - 1) * D_OUT + w_rows, N * H, BK)
            length = _length(mine, q, q, H)
            acc = _add_product(
                acc, h, w_at, rows, mine, q, q, length, T, ROW, False, EVEN, PRECISION, INTERPRET, BK
            )  # fmt: skip
    else:
        last: tl.constexpr = N - 1 if SECOND == "top" else N
        w_at = row_pointers(w_out, w_rows, N * H, BK)
        acc = _add_product(
            acc, h, w_at, rows, mine, 0, last, _length(mine, 0, last, H), T, ROW, SECOND == "shared", EVEN, PRECISION,
            INTERPRET, BK,
        )  # fmt: skip
    if SECOND == "top":
        runs_all = tl.max((mine == N).to(tl.int32), 0)
        if FROM_X:
            w_at = row_pointers(w_top, w_rows, D_IN, BK)
            acc = _add_product(
                acc, x, w_at, rows, mine, N, N, D_IN * runs_all, T, stride_x, False, False, PRECISION, INTERPRET, BK
            )  # fmt: skip
        else:
            w_at = row_pointers(w_top, w_rows, N * H, BK)
            acc = _add_product(
                acc, h, w_at, rows, mine, N, N, N * H * runs_all, T, ROW, False, EVEN, PRECISION, INTERPRET, BK
            )  # fmt: skip
    if RESIDUAL:
        at = residual + rows.to(tl.int64)[:, None] * stride_r + columns[None, :]
        acc += tl.load(at, mask=real, other=0.0).to(tl.float32)
    tl.store(y + rows[:, None] * D_OUT + columns[None, :], acc.to(y.dtype.element_ty), mask=real)
