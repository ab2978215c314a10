"""A gate's first product and both layers for one token, as in decoding: weights times a vector, no matrix products.

What takes time is reading weights once. A program has a few rows of them, and a sum in fp32 for every element of a
step, so that no load waits for another and many programs share a multiprocessor. The kernels take the operands of those
for few tokens, in whose place they run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import activate
from acm_compiler.codegen.gpu.blocks import row_pointers
from acm_compiler.codegen.gpu.few_tokens import few1_kernel, few2_kernel
from acm_compiler.codegen.gpu.tiles import Tiles


def layer_kernels(tiles: Tiles) -> tuple[Any, Any]:
    """Kernels of both layers where nothing is sorted: of one token, or of few."""
    return (one1_kernel, one2_kernel) if tiles.layer1.m == 1 else (few1_kernel, few2_kernel)


@triton.jit
def _vector(a, k, end, EVEN: tl.constexpr, BK: tl.constexpr):
    """Elements [k, k + BK) of a vector as a row, fp32, zeros from `end` on; and which of them are there."""
    here = (k + tl.arange(0, BK)) < end
    if EVEN:
        return tl.load(a + k + tl.arange(0, BK)).to(tl.float32)[None, :], here
    else:
        return tl.load(a + k + tl.arange(0, BK), mask=here, other=0.0).to(tl.float32)[None, :], here


@triton.jit
def _rows(w_at, k, here, EVEN: tl.constexpr):
    """Elements of rows of weights, fp32; they are read once, so no cache need keep them."""
    if EVEN:
        return tl.load(w_at + k, eviction_policy="evict_first").to(tl.float32)
    else:
        return tl.load(w_at + k, mask=here[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def one1_kernel(
    h, x, w_in, b_in, w_up, b_up, k_of, T, D_IN, stride_x, N: tl.constexpr, H: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """h [N * H] as far as k learners reach; of a k beyond N nothing. BN columns for each program."""
    k_here = tl.load(k_of).to(tl.int32)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    if tl.program_id(0) * BN < tl.where(k_here > N, 0, k_here) * H:
        rows = tl.minimum(columns, N * H - 1)
        in_at = row_pointers(w_in, rows, D_IN, BK)
        acc = tl.zeros((BN, BK), tl.float32)
        up = tl.zeros((BN, BK), tl.float32)
        for k in tl.range(0, D_IN, BK, loop_unroll_factor=2):
            a, here = _vector(x, k, D_IN, EVEN, BK)
            acc += a * _rows(in_at, k, here, EVEN)
            if GATED:
                up += a * _rows(row_pointers(w_up, rows, D_IN, BK), k, here, EVEN)
        value = tl.sum(acc, 1)
        if BIAS:
            value += tl.load(b_in + rows).to(tl.float32)
        value = activate(value, ACT, SHORT, INTERPRET)
        if GATED:
            other = tl.sum(up, 1)
            if BIAS:
                other += tl.load(b_up + rows).to(tl.float32)
            value *= other
        tl.store(h + columns, value.to(h.dtype.element_ty), mask=columns < N * H)


@triton.jit
def one2_kernel(
    y, h, w_out, b_out, x, w_top, residual, k_of, T, D_IN, stride_x, stride_r, N: tl.constexpr, H: tl.constexpr,
    D_OUT: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y [D_OUT] = h W_out + b_out(k) + residual, NaN for a k that does not exist; BN outputs for each program."""
    k_here = tl.load(k_of).to(tl.int32)
    length = tl.where((k_here >= 0) & (k_here <= N), k_here, 0) * H
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    real = columns < D_OUT
    k_all = k_here + tl.zeros((BN,), tl.int32)  # Triton 3.9's interpreter takes no scalar in a mask
    at = b_out + k_here * D_OUT + columns
    beside = tl.load(at, mask=real & (k_all >= 0) & (k_all <= N), other=float("nan")).to(tl.float32)
    if RESIDUAL:
        beside += tl.load(residual + columns, mask=real, other=0.0).to(tl.float32)
    w_at = row_pointers(w_out, tl.minimum(columns, D_OUT - 1), N * H, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    for k in tl.range(0, length, BK, loop_unroll_factor=2):
        a, here = _vector(h, k, length, EVEN, BK)
        acc += a * _rows(w_at, k, here, EVEN)
    tl.store(y + columns, (tl.sum(acc, 1) + beside).to(y.dtype.element_ty), mask=real)


@triton.jit
def one_part_kernel(
    parts, x, w_inner, T, D_IN, SPAN, stride_x, G: tl.constexpr, ROW: tl.constexpr, EVEN: tl.constexpr,
    GP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """parts [spans, ROW] fp32, as `gate_part_kernel` gives them: of one token, GP columns for each program."""
    BLOCKS: tl.constexpr = ROW // GP
    span = tl.program_id(0) // BLOCKS
    columns = tl.program_id(0) % BLOCKS * GP + tl.arange(0, GP)
    w_at = row_pointers(w_inner, tl.minimum(columns, G - 1), D_IN, BK)
    acc = tl.zeros((GP, BK), tl.float32)
    end = tl.minimum((span + 1) * SPAN, D_IN)
    for k in tl.range(span * SPAN, end, BK, loop_unroll_factor=4):
        a, here = _vector(x, k, end, EVEN, BK)
        acc += a * _rows(w_at, k, here, EVEN)
    value = tl.where(columns < G, tl.sum(acc, 1), 0.0)
    tl.store(parts + span * ROW + columns, value, mask=columns < ROW)
