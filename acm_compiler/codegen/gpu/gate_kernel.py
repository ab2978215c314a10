"""The gate: linear, GELU, linear, utilities, choice; of T tokens k is written, and how many tokens of a block run each.

One kernel, or for few tokens of a large gate two: products over parts of x, and what follows from their sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import gelu


@triton.jit
def _moments(x, x_at, rows, stride_x, steps, D_IN, eps, CENTRED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """A value of each row, its mean as a distance from that, and one over its deviation, merged block by block; fp32.

    Not CENTRED: 0, 0, and one over the root of its mean square.
    """
    mean = tl.zeros((BM,), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    shift = tl.zeros((BM,), tl.float32)
    if CENTRED:
        shift = tl.load(x + rows * stride_x).to(tl.float32)
    for k in range(0, D_IN, BK):
        here = (k + steps < D_IN)[None, :]
        off = tl.where(here, tl.load(x_at + k, mask=here, other=0.0).to(tl.float32) - shift[:, None], 0.0)
        if CENTRED:
            count = tl.minimum(D_IN - k, BK) * 1.0
            part = tl.sum(off, 1) / count
            off = tl.where(here, off - part[:, None], 0.0)
            further = part - mean
            squares += further * further * (k * count / (k + count))
            mean += further * (count / (k + count))
        squares += tl.sum(off * off, 1)
    return shift, mean, tl.rsqrt(squares / D_IN + tl.cast(eps, tl.float32))


@triton.jit
def _normalised(a, shift, mean, scale, weight, bias, columns, D_IN):
    """A block of rows, normalised and rounded to their type."""
    y = (a.to(tl.float32) - shift[:, None] - mean[:, None]) * scale[:, None]
    if weight is not None:
        y *= tl.load(weight + columns, mask=columns < D_IN, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        y += tl.load(bias + columns, mask=columns < D_IN, other=0.0).to(tl.float32)[None, :]
    return y.to(a.dtype)


@triton.jit
def _utility(score, k, knob, cost, RULE: tl.constexpr):
    """The utility of every choice, as the reference's `utilities` has it."""
    price = k.to(tl.float32) * tl.cast(cost, tl.float32)  # Inductor gives numbers in fp64
    if RULE == "damage":
        other = knob + tl.log(price)
        apart = tl.where(score == other, 0.0, tl.abs(score - other))  # of two infinities, too
        return -(tl.maximum(score, other) + tl.log(1.0 + tl.exp(-apart)))
    else:
        tl.static_assert(RULE == "logits", "a rule that no kernel knows")
        return score - knob * price


@triton.jit
def _best(u, choice, k_lo, k_hi, K_MIN: tl.constexpr, C: tl.constexpr):
    """The best k of every row, as the reference's `choose_k` has it.

    No NaN reaches the argmax, which would be free to give a column that is padding, and what it gives is
    clamped: a k beyond the last would read weights that are not there.
    """
    most = tl.minimum(tl.maximum(k_hi, K_MIN), K_MIN + C - 1)
    least = tl.minimum(tl.maximum(k_lo, K_MIN), most)
    allowed = ((choice >= least) & (choice <= most))[None, :]
    lost = tl.max((allowed & (u != u)).to(tl.int32), 1) > 0
    best = tl.argmax(tl.where(allowed & (u == u), u, float("-inf")), 1).to(tl.int32) + K_MIN
    return tl.where(lost, most, tl.minimum(tl.maximum(best, least), most))


@triton.jit
def _product(
    x_at, w_at, first, end, steps, shift, mean, scale, norm_weight, norm_bias, D_IN, EVEN: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BM: tl.constexpr, GP: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Rows of x times columns of the first weight over features [first, end), fp32 [BM, GP]; EVEN: whole steps."""
    acc = tl.zeros((BM, GP), tl.float32)
    for k in range(first, end, BK):
        if EVEN:
            a = tl.load(x_at + k)
            b = tl.load(w_at + k)
        else:
            a = tl.load(x_at + k, mask=(k + steps < end)[None, :], other=0.0)
            b = tl.load(w_at + k, mask=(k + steps < end)[:, None], other=0.0)
        if NORM:
            a = _normalised(a, shift, mean, scale, norm_weight, norm_bias, k + steps, D_IN)
        if INTERPRET:  # the interpreter's dot takes bf16 for its bit pattern
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _add_scores(score, acc, b_inner, w_outer, inner, outer, G: tl.constexpr, C: tl.constexpr, INTERPRET: tl.constexpr):
    """score + GELU(acc + b_inner) W_outer, of some of the G columns.

    Choice by choice, the next one's weight on its way: a product would hold all of h and of the weight in registers.
    """
    acc += tl.load(b_inner + inner, mask=inner < G, other=0.0).to(tl.float32)[None, :]
    h = gelu(acc, False, INTERPRET)
    w = tl.load(w_outer + inner, mask=inner < G, other=0.0)
    for c in range(C):
        following = tl.load(w_outer + (c + 1) * G + inner, mask=(inner < G) & (c + 1 < C), other=0.0)
        total = tl.sum(h * w.to(tl.float32)[None, :], 1)
        score = tl.where((outer == c)[None, :], score + total[:, None], score)
        w = following
    return score


@triton.jit
def _choose(
    k_out, histogram, score, b_outer, knob, k_lo, k_hi, rows, outer, T, cost, C: tl.constexpr, K_MIN: tl.constexpr,
    RULE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write k of rows from their scores, and, into this program's row of the histogram, how many have each."""
    score += tl.load(b_outer + outer, mask=outer < C, other=0.0).to(tl.float32)[None, :]
    choice = outer + K_MIN
    u = _utility(score, choice[None, :], tl.load(knob), cost, RULE)
    best = _best(u, choice, tl.load(k_lo), tl.load(k_hi), K_MIN, C)
    if histogram is not None:
        slots = tl.arange(0, SLOTS)
        is_slot = (best[:, None] == slots[None, :]) & (rows < T)[:, None]
        tl.store(histogram + tl.program_id(0) * SLOTS + slots, tl.sum(is_slot.to(tl.int32), 0))
    tl.store(k_out + rows, best, mask=rows < T)


@triton.jit(do_not_specialize=["T", "cost", "eps"], do_not_specialize_on_alignment=["knob", "k_lo", "k_hi"])
def gate_kernel(
    k_out, histogram, x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, norm_weight, norm_bias, T, D_IN,
    stride_x, cost, eps, G: tl.constexpr, C: tl.constexpr, K_MIN: tl.constexpr, RULE: tl.constexpr,
    SLOTS: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, GP: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """k_out [T]; w_inner [G, D_IN], w_outer [C, G]; knob fp32, k_lo and k_hi int32 scalars in memory.

    histogram [programs, SLOTS] or None. Columns of the first product are taken GP at a time; x is read again for each,
    and once more before for NORM, from a cache.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    outer = tl.arange(0, CP)
    steps = tl.arange(0, BK)
    x_at = x + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * stride_x + steps[None, :]
    shift, mean, scale = 0.0, 0.0, 0.0
    if NORM:
        source = tl.minimum(rows, T - 1).to(tl.int64)
        shift, mean, scale = _moments(x, x_at, source, stride_x, steps, D_IN, eps, CENTRED, BM, BK)
    score = tl.zeros((BM, CP), tl.float32)
    for first in range(0, G, GP):
        inner = first + tl.arange(0, GP)
        w_at = w_inner + tl.minimum(inner, G - 1)[None, :] * D_IN + steps[:, None]
        acc = _product(
            x_at, w_at, 0, D_IN, steps, shift, mean, scale, norm_weight, norm_bias, D_IN, EVEN, NORM, PRECISION,
            INTERPRET, BM, GP, BK,
        )  # fmt: skip
        score = _add_scores(score, acc, b_inner, w_outer, inner, outer, G, C, INTERPRET)
    _choose(k_out, histogram, score, b_outer, knob, k_lo, k_hi, rows, outer, T, cost, C, K_MIN, RULE, SLOTS)


@triton.jit(do_not_specialize=["T", "eps"])
def gate_part_kernel(
    parts, x, w_inner, norm_weight, norm_bias, T, D_IN, stride_x, eps, G: tl.constexpr, SPAN: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    ROWS: tl.constexpr, ROW: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """parts [spans, ROWS, ROW] fp32: first products of T <= ROWS rows over SPAN features each."""
    BLOCKS: tl.constexpr = ROW // GP
    tile = tl.program_id(0) // BLOCKS
    rows = tile % (ROWS // BM) * BM + tl.arange(0, BM)
    steps = tl.arange(0, BK)
    inner = tl.program_id(0) % BLOCKS * GP + tl.arange(0, GP)
    span = tile // (ROWS // BM)
    x_at = x + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * stride_x + steps[None, :]
    w_at = w_inner + tl.minimum(inner, G - 1)[None, :] * D_IN + steps[:, None]
    shift, mean, scale = 0.0, 0.0, 0.0
    if NORM:
        source = tl.minimum(rows, T - 1).to(tl.int64)
        shift, mean, scale = _moments(x, x_at, source, stride_x, steps, D_IN, eps, CENTRED, BM, BK)
    acc = _product(
        x_at, w_at, span * SPAN, tl.minimum((span + 1) * SPAN, D_IN), steps, shift, mean, scale, norm_weight, norm_bias,
        D_IN, EVEN, NORM, PRECISION, INTERPRET, BM, GP, BK,
    )  # fmt: skip
    tl.store(parts + (span * ROWS + rows)[:, None] * ROW + inner[None, :], acc)


@triton.jit(do_not_specialize=["T", "cost"], do_not_specialize_on_alignment=["knob", "k_lo", "k_hi"])
def gate_sum_kernel(
    k_out, parts, b_inner, w_outer, b_outer, knob, k_lo, k_hi, T, SPANS, cost, G: tl.constexpr, C: tl.constexpr,
    K_MIN: tl.constexpr, RULE: tl.constexpr, INTERPRET: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr,
    GP: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """k_out [T] from the parts [SPANS, ROWS, ROW] of the first product, which are added in their order."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    outer = tl.arange(0, CP)
    score = tl.zeros((BM, CP), tl.float32)
    for first in range(0, G, GP):
        inner = first + tl.arange(0, GP)
        here = (rows < T)[:, None] & (inner < G)[None, :]
        acc = tl.zeros((BM, GP), tl.float32)
        for span in range(0, SPANS):
            acc += tl.load(parts + (span * ROWS + rows)[:, None] * ROW + inner[None, :], mask=here, other=0.0)
        score = _add_scores(score, acc, b_inner, w_outer, inner, outer, G, C, INTERPRET)
    _choose(k_out, None, score, b_outer, knob, k_lo, k_hi, rows, outer, T, cost, C, K_MIN, RULE, 1)
