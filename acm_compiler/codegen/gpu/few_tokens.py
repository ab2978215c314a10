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
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """h [T, ROW], T <= BM, in token order: zeros beyond a token's k * H, nothing beyond the largest."""
    rows = tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    real = columns < N * H
    end = tl.load(k_of + rows, mask=rows < T, other=0).to(tl.int32) * H
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


@triton.jit(do_not_specialize=["T"])
def few2_kernel(
    y, h, w_out, b_out, residual, k_of, T, stride_r,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, D_OUT: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y [T, D_OUT] = h W_out + b_out(k) + residual, T <= BM; w_out [D_OUT, N * H]."""
    rows = tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.load(k_of + rows, mask=rows < T, other=0).to(tl.int32)
    exists = (mine >= 0) & (mine <= N)
    length = tl.minimum(tl.max(mine, 0), N) * H
    a_at = row_pointers(h, tl.minimum(rows, T - 1), ROW, BK)
    w_at = row_pointers(w_out, tl.minimum(columns, D_OUT - 1), N * H, BK)
    real = (rows < T)[:, None] & (columns < D_OUT)[None, :]
    at = b_out + mine[:, None] * D_OUT + columns[None, :]
    acc = tl.load(at, mask=real & exists[:, None], other=float("nan")).to(tl.float32)
    for k in range(0, length, BK):
        left = load_block(h, a_at, 0, k, length, False, EVEN, BK)
        right = load_block(w_out, w_at, 0, k, length, False, EVEN, BK)
        acc = multiply(left, right, acc, PRECISION, INTERPRET)
    if RESIDUAL:
        at = residual + rows.to(tl.int64)[:, None] * stride_r + columns[None, :]
        acc += tl.load(at, mask=real, other=0.0).to(tl.float32)
    tl.store(y + rows[:, None] * D_OUT + columns[None, :], acc.to(y.dtype.element_ty), mask=real)
