"""Both layers for a handful of tokens: nothing is sorted, learners that no token runs are not read.

Weights are what takes time: each element is read once, in many parts at a time. Rows are taken 32 at a time, which
keeps products off wgmma, whose operands Triton before 3.7 may not copy in advance by pointers; rows beyond the last
token are not read. A k outside [0, N] gives NaN for its token.
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


@triton.jit
def _prefetch(bias, columns, INTERPRET: tl.constexpr):
    """The columns, once their biases are sent for: a load before a product would be waited for before it.

    Given back by the instruction, so that it counts as pure: compilers know what such kernels read and write.
    """
    if INTERPRET:
        return columns
    else:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, $2;"
        at = (bias + columns).to(tl.int64)
        return tl.inline_asm_elementwise(asm, "=r, l, r", [at, columns], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _k_of(k_of, rows, T):
    return tl.load(k_of + rows, mask=rows < T, other=0).to(tl.int32)


@triton.jit
def _load_rows(source, rows, T, stride, k, length, EVEN: tl.constexpr, BK: tl.constexpr):
    """Elements [k, k + BK) of some rows; zeros for rows from T on and beyond `length`."""
    mask = (rows < T)[:, None] if EVEN else (rows < T)[:, None] & ((k + tl.arange(0, BK)) < length)[None, :]
    return tl.load(row_pointers(source, rows, stride, BK) + k, mask=mask, other=0.0)


@triton.jit
def _store_hidden(
    h, value, up, bias, bias_up, rows, mine, columns, T, N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr,
    Q_HI: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    value = activate(value + bias, ACT, SHORT, INTERPRET)
    if GATED:
        value *= up + bias_up
    value = tl.where(columns[None, :] < (tl.where(mine > Q_HI, 0, mine) * H)[:, None], value, 0.0)
    at = h + rows[:, None] * ROW + columns[None, :]
    tl.store(at, value.to(h.dtype.element_ty), mask=(rows < T)[:, None] & (columns < N * H)[None, :])


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
    HALF: tl.constexpr = BM if BM < 32 else 32
    rows = tl.arange(0, HALF)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    real = columns < N * H
    mine = _k_of(k_of, rows, T)
    mine2 = _k_of(k_of, HALF + rows, T) if BM > HALF else mine
    most = tl.max(tl.maximum(tl.where(mine > Q_HI, 0, mine), tl.where(mine2 > Q_HI, 0, mine2)), 0)
    if tl.program_id(0) * BN < tl.minimum(most, N) * H:
        w_rows = tl.minimum(columns, N * H - 1)
        if BIAS:
            w_rows = _prefetch(b_in, w_rows, INTERPRET)
        in_at = row_pointers(w_in, w_rows, D_IN, BK)
        acc = tl.zeros((HALF, BN), tl.float32)
        up, acc2, up2 = acc, acc, acc
        for k in range(0, D_IN, BK):
            a = _load_rows(x, rows, T, stride_x, k, D_IN, EVEN, BK)
            w = load_block(w_in, in_at, 0, k, D_IN, False, EVEN, BK)
            acc = multiply(a, w, acc, PRECISION, INTERPRET)
            if BM > HALF:
                a2 = _load_rows(x, HALF + rows, T, stride_x, k, D_IN, EVEN, BK)
                acc2 = multiply(a2, w, acc2, PRECISION, INTERPRET)
            if GATED:
                w = load_block(w_up, row_pointers(w_up, w_rows, D_IN, BK), 0, k, D_IN, False, EVEN, BK)
                up = multiply(a, w, up, PRECISION, INTERPRET)
                if BM > HALF:
                    up2 = multiply(a2, w, up2, PRECISION, INTERPRET)
        bias = _bias(b_in, columns, real, BIAS)
        bias_up = _bias(b_up, columns, real, BIAS and GATED)
        _store_hidden(
            h, acc, up, bias, bias_up, rows, mine, columns, T, N, H, ROW, Q_HI, ACT, GATED, SHORT, INTERPRET
        )  # fmt: skip
        if BM > HALF:
            _store_hidden(
                h, acc2, up2, bias, bias_up, HALF + rows, mine2, columns, T, N, H, ROW, Q_HI, ACT, GATED, SHORT,
                INTERPRET,
            )  # fmt: skip


@triton.jit
def _among(mine, low, high):
    return (mine >= low) & (mine <= high)


@triton.jit
def _length(mine, mine2, low, high, H: tl.constexpr):
    """Hidden columns of the largest k in [low, high] that a token runs."""
    most = tl.maximum(tl.where(_among(mine, low, high), mine, 0), tl.where(_among(mine2, low, high), mine2, 0))
    return tl.maximum(tl.max(most, 0), 0) * H


@triton.jit
def _add_product(
    acc, acc2, a, w_at, rows, mine, mine2, low, high, first, length, T, stride_a, ALL: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """acc + a W.T over BK of every STEP of `length` columns, for tokens with k in [low, high] unless for ALL.

    acc2: of the second half of BM rows. The sum is masked, not the operand, which so never comes from registers.
    """
    HALF: tl.constexpr = BM if BM < 32 else 32
    own = acc if ALL else tl.zeros_like(acc)
    own2 = acc2 if ALL else tl.zeros_like(acc2)
    for k in range(first, length, STEP):
        w = load_block(a, w_at, 0, k, length, False, EVEN, BK)
        own = multiply(_load_rows(a, rows, T, stride_a, k, length, EVEN, BK), w, own, PRECISION, INTERPRET)
        if BM > HALF:
            a2 = _load_rows(a, HALF + rows, T, stride_a, k, length, EVEN, BK)
            own2 = multiply(a2, w, own2, PRECISION, INTERPRET)
    if not ALL:
        own = tl.where(_among(mine, low, high)[:, None], acc + own, acc)
        own2 = tl.where(_among(mine2, low, high)[:, None], acc2 + own2, acc2)
    return own, own2


@triton.jit
def _beside(
    b_out, residual, k_of, rows, columns, T, stride_r, N: tl.constexpr, D_OUT: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """b_out(k) + residual, fp32; NaN for a k that does not exist."""
    mine = _k_of(k_of, rows, T)
    real = (rows < T)[:, None] & (columns < D_OUT)[None, :]
    at = b_out + mine[:, None] * D_OUT + columns[None, :]
    value = tl.load(at, mask=real & _among(mine, 0, N)[:, None], other=float("nan")).to(tl.float32)
    if RESIDUAL:
        at = residual + rows.to(tl.int64)[:, None] * stride_r + columns[None, :]
        value += tl.load(at, mask=real, other=0.0).to(tl.float32)
    return value


@triton.jit
def _finish(
    y, acc, b_out, residual, k_of, rows, columns, T, stride_r, N: tl.constexpr, D_OUT: tl.constexpr,
    RESIDUAL: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
    """Write rows of y: of a part nothing but the sum."""
    if not IS_PART:
        acc += _beside(b_out, residual, k_of, rows, columns, T, stride_r, N, D_OUT, RESIDUAL)
    real = (rows < T)[:, None] & (columns < D_OUT)[None, :]
    tl.store(y + rows[:, None] * D_OUT + columns[None, :], acc.to(y.dtype.element_ty), mask=real)


@triton.jit
def _add_top(
    acc, acc2, h, x, w_top, w_rows, rows, mine, mine2, first, T, D_IN, stride_x, N: tl.constexpr, H: tl.constexpr,
    ROW: tl.constexpr, FROM_X: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    STEP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + h or, FROM_X, x times w_top, for tokens with k = N; nothing is read where there are none."""
    runs_all = tl.minimum(_length(mine, mine2, N, N, 1), 1)
    if FROM_X:
        w_at = row_pointers(w_top, w_rows, D_IN, BK)
        acc, acc2 = _add_product(
            acc, acc2, x, w_at, rows, mine, mine2, N, N, first, D_IN * runs_all, T, stride_x, False, False, PRECISION,
            INTERPRET, STEP, BM, BK,
        )  # fmt: skip
    else:
        w_at = row_pointers(w_top, w_rows, N * H, BK)
        acc, acc2 = _add_product(
            acc, acc2, h, w_at, rows, mine, mine2, N, N, first, N * H * runs_all, T, ROW, False, EVEN, PRECISION,
            INTERPRET, STEP, BM, BK,
        )  # fmt: skip
    return acc, acc2


@triton.jit(do_not_specialize=["T"])
def few2_kernel(
    y, h, w_out, b_out, x, w_top, residual, k_of, T, D_IN, stride_x, stride_r,
    N: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, D_OUT: tl.constexpr, SECOND: tl.constexpr,
    FROM_X: tl.constexpr, RESIDUAL: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y [T, D_OUT] = h W_out + b_out(k) + residual, T <= BM; w_out [D_OUT, N * H].

    SPLITS > 1: y is [SPLITS, T, D_OUT], fp32, to be added up by `few_sum_kernel`; each part has every SPLITS-th step of
    the inner product, so all have as much to do whatever k is, and a token's sum does not depend on others' k.
    SECOND "top": tokens with k = N take w_top, [D_OUT, N * H] of h or, FROM_X, [D_OUT, D_IN] of x. "per_k": w_out has
    one such matrix per k, of which those that some token needs are read.
    """
    HALF: tl.constexpr = BM if BM < 32 else 32
    STEP: tl.constexpr = SPLITS * BK
    split = tl.program_id(0) % SPLITS
    first = split * BK
    rows = tl.arange(0, HALF)
    columns = tl.program_id(0) // SPLITS * BN + tl.arange(0, BN)
    mine = _k_of(k_of, rows, T)
    mine2 = _k_of(k_of, HALF + rows, T) if BM > HALF else mine
    w_rows = tl.minimum(columns, D_OUT - 1)
    acc = tl.zeros((HALF, BN), tl.float32)
    acc2 = acc
    if SPLITS == 1:
        for q in tl.static_range(N + 1):
            w_rows = _prefetch(b_out + q * D_OUT, w_rows, INTERPRET)
    if SECOND == "per_k":
        for q in range(1, N + 1):
            w_at = row_pointers(w_out, (q - 1) * D_OUT + w_rows, N * H, BK)
            length = _length(mine, mine2, q, q, H)
            acc, acc2 = _add_product(
                acc, acc2, h, w_at, rows, mine, mine2, q, q, first, length, T, ROW, False, EVEN, PRECISION, INTERPRET,
                STEP, BM, BK,
            )  # fmt: skip
    else:
        last: tl.constexpr = N - 1 if SECOND == "top" else N
        w_at = row_pointers(w_out, w_rows, N * H, BK)
        acc, acc2 = _add_product(
            acc, acc2, h, w_at, rows, mine, mine2, 0, last, first, _length(mine, mine2, 0, last, H), T, ROW,
            SECOND == "shared", EVEN, PRECISION, INTERPRET, STEP, BM, BK,
        )  # fmt: skip
    if SECOND == "top":
        acc, acc2 = _add_top(
            acc, acc2, h, x, w_top, w_rows, rows, mine, mine2, first, T, D_IN, stride_x, N, H, ROW, FROM_X, EVEN,
            PRECISION, INTERPRET, STEP, BM, BK,
        )  # fmt: skip
    y += split.to(tl.int64) * T * D_OUT
    _finish(y, acc, b_out, residual, k_of, rows, columns, T, stride_r, N, D_OUT, RESIDUAL, SPLITS > 1)
    if BM > HALF:
        _finish(y, acc2, b_out, residual, k_of, HALF + rows, columns, T, stride_r, N, D_OUT, RESIDUAL, SPLITS > 1)


@triton.jit(do_not_specialize=["T"])
def few_sum_kernel(
    y, parts, b_out, residual, k_of, T, stride_r, N: tl.constexpr, D_OUT: tl.constexpr, RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y [T, D_OUT]: the sum of parts [SPLITS, T, D_OUT] in order, b_out(k), residual; BN columns of a token each."""
    BLOCKS: tl.constexpr = (D_OUT + BN - 1) // BN
    rows = tl.program_id(0) // BLOCKS + tl.arange(0, 1)
    columns = tl.program_id(0) % BLOCKS * BN + tl.arange(0, BN)
    total = tl.zeros((1, BN), tl.float32)
    for part in tl.static_range(SPLITS):
        at = parts + (part * T + rows)[:, None] * D_OUT + columns[None, :]
        total += tl.load(at, mask=(columns < D_OUT)[None, :], other=0.0)
    _finish(y, total, b_out, residual, k_of, rows, columns, T, stride_r, N, D_OUT, RESIDUAL, False)
