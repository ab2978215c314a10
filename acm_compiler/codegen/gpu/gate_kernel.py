"""The gate: linear, GELU, linear, utilities, choice; of T tokens k is written, and how many tokens of a block run each.

One kernel, or for a large gate two: the first product in parts, by blocks of rows, of columns and of features, and what
follows from their sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from acm_compiler.codegen.gpu.activation import gelu
from acm_compiler.codegen.gpu.blocks import load_block, multiply, row_pointers


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
    x, x_at, w, w_at, row, column, first, end, BULK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, GP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows of x times columns of the first weight over features [first, end), fp32 [BM, GP].

    BULK: both are descriptors, read from a row and a column on; else pointers lead there. EVEN: whole steps.
    """
    acc = tl.zeros((BM, GP), tl.float32)
    for k in range(first, end, BK):
        a = load_block(x, x_at, row, k, end, BULK, EVEN, BK)
        b = load_block(w, w_at, column, k, end, BULK, EVEN, BK)
        acc = multiply(a.to(b.dtype), b, acc, PRECISION, INTERPRET)
    return acc


@triton.jit
def _add_scores(
    score, acc, w_outer, place, outer, G: tl.constexpr, C: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """score + GELU(acc) W_outer, of some of the G columns, which lie at `place`, [1 or rows, columns].

    Choice by choice: a product would hold all of h and of the weight in registers. The weights of several are on their
    way at once.
    """
    h = gelu(acc, False, INTERPRET)
    for c in tl.range(0, C, loop_unroll_factor=min(C, 8)):
        w = tl.load(w_outer + c * G + place, mask=place < G, other=0.0).to(tl.float32)
        score = tl.where((outer == c)[None, :], score + tl.sum(h * w, 1)[:, None], score)
    return score


@triton.jit
def _terms(b_outer, knob, k_lo, k_hi, outer, C: tl.constexpr):
    """Terms of a choice beside scores: b_outer in fp32, knob, bounds."""
    bias = tl.load(b_outer + outer, mask=outer < C, other=0.0).to(tl.float32)
    return bias, tl.load(knob), tl.load(k_lo), tl.load(k_hi)


@triton.jit
def _choose(
    k_out, histogram, score, bias, knob, k_lo, k_hi, rows, outer, T, cost, C: tl.constexpr, K_MIN: tl.constexpr,
    RULE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write k of rows from their scores, and, into this program's row of the histogram, how many have each."""
    choice = outer + K_MIN
    u = _utility(score + bias[None, :], choice[None, :], knob, cost, RULE)
    best = _best(u, choice, k_lo, k_hi, K_MIN, C)
    if histogram is not None:
        slots = tl.arange(0, SLOTS)
        is_slot = (best[:, None] == slots[None, :]) & (rows < T)[:, None]
        tl.store(histogram + tl.program_id(0) * SLOTS + slots, tl.sum(is_slot.to(tl.int32), 0))
    tl.store(k_out + rows, best, mask=rows < T)


@triton.jit(do_not_specialize=["T", "cost"], do_not_specialize_on_alignment=["knob", "k_lo", "k_hi"])
def gate_kernel(
    k_out, histogram, x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, T, D_IN, stride_x, cost,
    G: tl.constexpr, C: tl.constexpr, K_MIN: tl.constexpr, RULE: tl.constexpr, SLOTS: tl.constexpr,
    BULK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, GP: tl.constexpr,
    CP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """k_out [T]; w_inner [G, D_IN], w_outer [C, G]; knob fp32, k_lo and k_hi int32 scalars in memory.

    histogram [programs, SLOTS] or None. Columns of the first product are taken GP at a time; x is read again for each,
    from a cache. BULK: x and w_inner are descriptors of blocks [BM, BK], [GP, BK].
    """
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    outer = tl.arange(0, CP)
    x_at = x if BULK else row_pointers(x, tl.minimum(rows, T - 1), stride_x, BK)
    bias, price, low, high = _terms(b_outer, knob, k_lo, k_hi, outer, C)  # not to be waited for at the end
    score = tl.zeros((BM, CP), tl.float32)
    for first in range(0, G, GP):
        inner = first + tl.arange(0, GP)
        w_at = w_inner if BULK else row_pointers(w_inner, tl.minimum(inner, G - 1), D_IN, BK)
        inner_bias = tl.load(b_inner + inner, mask=inner < G, other=0.0).to(tl.float32)[None, :]
        acc = _product(x, x_at, w_inner, w_at, row, first, 0, D_IN, BULK, EVEN, PRECISION, INTERPRET, BM, GP, BK)
        score = _add_scores(score, acc + inner_bias, w_outer, inner[None, :], outer, G, C, INTERPRET)
    _choose(k_out, histogram, score, bias, price, low, high, rows, outer, T, cost, C, K_MIN, RULE, SLOTS)


@triton.jit(do_not_specialize=["T"])
def gate_part_kernel(
    parts, x, w_inner, T, D_IN, SPAN, stride_x, G: tl.constexpr, ROW: tl.constexpr, BULK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """parts [spans, T, ROW] fp32: first products over SPAN features each, zeros behind the G columns.

    BULK as in `gate_kernel`.
    """
    BLOCKS: tl.constexpr = (G + GP - 1) // GP
    tile = tl.program_id(0) // BLOCKS
    tiles = (T + BM - 1) // BM
    span = tile // tiles
    row = tile % tiles * BM
    column = tl.program_id(0) % BLOCKS * GP
    rows = row + tl.arange(0, BM)
    inner = column + tl.arange(0, GP)
    x_at = x if BULK else row_pointers(x, tl.minimum(rows, T - 1), stride_x, BK)
    w_at = w_inner if BULK else row_pointers(w_inner, tl.minimum(inner, G - 1), D_IN, BK)
    acc = _product(
        x, x_at, w_inner, w_at, row, column, span * SPAN, tl.minimum((span + 1) * SPAN, D_IN), BULK, EVEN, PRECISION,
        INTERPRET, BM, GP, BK,
    )  # fmt: skip
    at = parts + (tl.cast(span, tl.int64) * T + rows)[:, None] * ROW + inner[None, :]
    acc = tl.where((inner < G)[None, :], acc, 0.0)
    tl.store(at, acc, mask=(rows < T)[:, None] & (inner < ROW)[None, :])


@triton.jit
def _scores_of_one(
    parts, b_inner, w_outer, outer, T, SPANS: tl.constexpr, G: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr,
    INTERPRET: tl.constexpr, SPANS_P: tl.constexpr, GP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Scores [1, CP] of a program's only row: all parts and weights are on their way before the first is used."""
    spans = tl.arange(0, SPANS_P)
    at = parts + (spans.to(tl.int64) * T + tl.program_id(0))[:, None] * ROW
    score = tl.zeros((CP,), tl.float32)
    for first in range(0, G, GP):
        inner = first + tl.arange(0, GP)
        part = tl.load(at + inner[None, :], mask=(spans < SPANS)[:, None] & (inner < ROW)[None, :], other=0.0)
        mask = (outer < C)[:, None] & (inner < G)[None, :]
        w = tl.load(w_outer + outer[:, None] * G + inner[None, :], mask=mask, other=0.0)
        bias = tl.load(b_inner + inner, mask=inner < G, other=0.0).to(tl.float32)
        h = gelu(tl.sum(part, 0) + bias, False, INTERPRET)
        score += tl.sum(h[None, :] * w.to(tl.float32), 1)
    return score[None, :]


@triton.jit(do_not_specialize=["T", "cost"], do_not_specialize_on_alignment=["knob", "k_lo", "k_hi"])
def gate_sum_kernel(
    k_out, histogram, parts, b_inner, w_outer, b_outer, knob, k_lo, k_hi, T, cost, SPANS: tl.constexpr,
    G: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr, K_MIN: tl.constexpr, RULE: tl.constexpr,
    SLOTS: tl.constexpr, INTERPRET: tl.constexpr, SPANS_P: tl.constexpr, GP: tl.constexpr, CP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """k_out [T] and histogram, as `gate_kernel` gives them, from the parts [SPANS, T, ROW] of the first product."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    outer = tl.arange(0, CP)
    if BM == 1:
        bias, price, low, high = _terms(b_outer, knob, k_lo, k_hi, outer, C)
        score = _scores_of_one(parts, b_inner, w_outer, outer, T, SPANS, G, ROW, C, INTERPRET, SPANS_P, GP, CP)
    else:
        score = tl.zeros((BM, CP), tl.float32)
        at = parts + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * ROW
        for first in range(0, G, GP):
            # for each row, as parts are read: so weights get there where they are needed, with nobody to wait for
            place = first + tl.arange(0, GP)[None, :] + tl.zeros((BM, GP), tl.int32)
            acc = tl.load(at + place, mask=place < ROW, other=0.0)
            for span in tl.static_range(1, SPANS):
                acc += tl.load(at + tl.cast(T, tl.int64) * (span * ROW) + place, mask=place < ROW, other=0.0)
            acc += tl.load(b_inner + place, mask=place < G, other=0.0).to(tl.float32)
            score = _add_scores(score, acc, w_outer, place, outer, G, C, INTERPRET)
        bias, price, low, high = _terms(b_outer, knob, k_lo, k_hi, outer, C)
    _choose(k_out, histogram, score, bias, price, low, high, rows, outer, T, cost, C, K_MIN, RULE, SLOTS)
