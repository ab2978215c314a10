"""The two layers of learners as `codegen.gpu.layers` has them, by two groups of warps in turn: the same arguments.

x, h and the weights of both are read by descriptors, x in sorted order; types of 16 bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from acm_compiler.codegen.gpu.activation import activate
from acm_compiler.codegen.gpu.blocks import find_band, raster
from acm_compiler.codegen.gpu.layers import add_bias, add_bias_of_rows, zero_beyond_k
from acm_compiler.codegen.gpu.turns.pipeline import (
    GROUP_REGISTERS,
    GROUP_WARPS,
    READER_REGISTERS,
    accumulators,
    halves,
    make_barriers,
    multiply_tile,
    read_blocks,
    store_layout,
    wait_for_turn,
)


@gluon.jit
def place1(tile, counts, N: gl.constexpr, H: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    """(first row, first column) of a tile of layer 1."""
    _, local, first, high, wide, _, _, _ = find_band(tile, counts, N, 1, N, H, 0, False, BM, BN)
    row_tile, column_tile = raster(local, high, wide, GROUP)
    return (first + row_tile) * BM, column_tile * BN


@gluon.jit
def read1(
    x, w_in, w_up, counts, tiles, D_IN, a_s, b_s, full, empty,
    N: gl.constexpr, H: gl.constexpr, TURNED: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    steps = gl.cdiv(D_IN, BK)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0 = place1(tile, counts, N, H, BM, BN, GROUP)
        for k in range(0, steps):
            if TURNED:
                read_blocks(x, w_in, w_up, m0, k * BK, k * BK, n0, step + k, a_s, b_s, full, empty, SLOTS)
            else:
                read_blocks(x, w_in, w_up, m0, k * BK, n0, k * BK, step + k, a_s, b_s, full, empty, SLOTS)
        step += steps


@gluon.jit
def write_tile(y, value, m0, n0, T, ROW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Write a tile of rows [T, ROW]."""
    layout: gl.constexpr = store_layout(BN)
    out = gl.convert_layout(value.to(y.dtype.element_ty), layout)
    rows = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
    columns = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
    at = y + rows.to(gl.int64)[:, None] * ROW + columns[None, :]
    gl.store(at, out, mask=(rows < T)[:, None] & (columns < ROW)[None, :])


@gluon.jit
def _end1(
    acc, up, facts, m0, n0,
    N: gl.constexpr, H: gl.constexpr, ROW: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, SHORT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Write h of sums [BM, BN], and what is before activations where that is kept."""
    h, before, before_up, b_in, b_up, counts, T = facts
    layout: gl.constexpr = acc.type.layout
    columns = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
    if BIAS:
        acc = add_bias(acc, b_in, columns, N * H)
    if before is not None:
        write_tile(before, acc, m0, n0, T, ROW, BM, BN)
    value = activate(acc, ACT, SHORT, False)
    if up is not None:
        if BIAS:
            up = add_bias(up, b_up, columns, N * H)
        if before_up is not None:
            write_tile(before_up, up, m0, n0, T, ROW, BM, BN)
        value *= up
    rows = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
    value = zero_beyond_k(value, rows, columns, counts, m0 + BM, n0 + BN, N, H)
    write_tile(h, value, m0, n0, T, ROW, BM, BN)


@gluon.jit
def _take1(
    WHOSE: gl.constexpr, given,
    N: gl.constexpr, H: gl.constexpr, ROW: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    TURNED: gl.constexpr, SHORT: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    h, before, before_up, b_in, b_up, counts, tiles, T, D_IN, a_s, b_s, full, empty, turn = given
    steps = gl.cdiv(D_IN, BK)
    own = 0
    for tile in range(gl.program_id(0) + WHOSE * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        m0, n0 = place1(tile, counts, N, H, BM, BN, GROUP)
        acc = accumulators(BM, 2 * BN if GATED else BN)
        wait_for_turn(turn, own, WHOSE)
        step = (2 * own + WHOSE) * steps
        acc = multiply_tile(acc, step, steps, a_s, b_s, full, empty, turn, WHOSE, SLOTS, TURNED)
        first, second = halves(acc, BM, 2 * BN if GATED else BN)
        facts = h, before, before_up, b_in, b_up, counts, T
        if GATED:
            _end1(first, second, facts, m0, n0, N, H, ROW, ACT, BIAS, SHORT, BM, BN)
        elif before is None:
            _end1(acc, None, facts, m0, n0, N, H, ROW, ACT, BIAS, SHORT, BM, BN)
        else:  # registers do not hold more than a half's beside the sums
            _end1(first, None, facts, m0, n0, N, H, ROW, ACT, BIAS, SHORT, BM, BN // 2)
            _end1(second, None, facts, m0, n0 + BN // 2, N, H, ROW, ACT, BIAS, SHORT, BM, BN // 2)
        own += 1


@gluon.jit(do_not_specialize=["T"])
def layer1_kernel(
    h, before, before_up, x, w_in, b_in, w_up, b_up, perm, counts, T, D_IN, stride_x,
    N: gl.constexpr, H: gl.constexpr, ROW: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    TURNED: gl.constexpr, SHORT: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """h [T, ROW] in sorted order; x [T, D_IN] sorted; w_in, w_up [N * H, D_IN], or TURNED; all by descriptors.

    GATED: both branches' columns lie side by side, so that one product gives BN of each.
    """
    a_s = gl.allocate_shared_memory(x.dtype, [SLOTS, BM, BK], x.layout)
    WIDE: gl.constexpr = 2 * BN if GATED else BN
    b_s = gl.allocate_shared_memory(x.dtype, [SLOTS, BK, BN] if TURNED else [SLOTS, WIDE, BK], w_in.layout)
    full, empty, turn = make_barriers(SLOTS)
    _, _, _, _, _, _, _, tiles = find_band(0, counts, N, 1, N, H, 0, False, BM, BN)
    given = (h, before, before_up, b_in, b_up, counts, tiles, T, D_IN, a_s, b_s, full, empty, turn)
    gl.warp_specialize(
        [
            (_take1, (0, given, N, H, ROW, ACT, GATED, BIAS, TURNED, SHORT, SLOTS, BM, BN, BK, GROUP)),
            (_take1, (1, given, N, H, ROW, ACT, GATED, BIAS, TURNED, SHORT, SLOTS, BM, BN, BK, GROUP)),
            (
                read1,
                (x, w_in, w_up, counts, tiles, D_IN, a_s, b_s, full, empty, N, H, TURNED, SLOTS, BM, BN, BK, GROUP),
            ),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, READER_REGISTERS],
    )


@gluon.jit
def _place2(
    tile, counts, N: gl.constexpr, H: gl.constexpr, D_OUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """(first row, first column, k of the tile's longest rows, end of the rows that it writes) of a tile of layer 2."""
    q, local, first, high, wide, _, hi, _ = find_band(tile, counts, N, 0, N, 0, D_OUT, False, BM, BN)
    row_tile, column_tile = raster(local, high, wide, GROUP)
    return (first + row_tile) * BM, column_tile * BN, q, hi


@gluon.jit
def _read2(
    a, w, counts, tiles, a_s, b_s, full, empty,
    N: gl.constexpr, H: gl.constexpr, D_OUT: gl.constexpr, TURNED: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0, q, _ = _place2(tile, counts, N, H, D_OUT, BM, BN, GROUP)
        steps = gl.cdiv(q * H, BK)
        for k in range(0, steps):
            if TURNED:
                read_blocks(a, w, None, m0, k * BK, k * BK, n0, step + k, a_s, b_s, full, empty, SLOTS)
            else:
                read_blocks(a, w, None, m0, k * BK, n0, k * BK, step + k, a_s, b_s, full, empty, SLOTS)
        step += steps


@gluon.jit
def _write(
    y, acc, b_out, residual, perm, counts, m0, n0, q, hi, stride_r,
    N: gl.constexpr, D_OUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Write columns from n0 on of the tokens of sorted rows [m0, hi): sums, b_out(k), the residual."""
    whole: gl.constexpr = store_layout(BN)
    rows = m0 + gl.arange(0, BM, gl.SliceLayout(1, whole))
    columns = n0 + gl.arange(0, BN, gl.SliceLayout(0, whole))
    token = gl.load(perm + rows, mask=rows < hi, other=0).to(gl.int64)
    real = (rows < hi)[:, None] & (columns < D_OUT)[None, :]
    if b_out is not None:
        layout: gl.constexpr = acc.type.layout
        own_rows = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
        own_columns = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
        acc = add_bias_of_rows(acc, b_out, own_rows, own_columns, counts, m0 + BM - 1, q, N, D_OUT)
    if residual is not None:
        beside = gl.load(residual + token[:, None] * stride_r + columns[None, :], mask=real, other=0.0)
        acc += gl.convert_layout(beside, acc.type.layout).to(gl.float32)
    at = y + token[:, None] * D_OUT + columns[None, :]
    gl.store(at, gl.convert_layout(acc.to(y.dtype.element_ty), whole), mask=real)


@gluon.jit
def _take2(
    WHOSE: gl.constexpr, given,
    N: gl.constexpr, H: gl.constexpr, D_OUT: gl.constexpr, TURNED: gl.constexpr,
    SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    y, b_out, residual, perm, counts, tiles, stride_r, a_s, b_s, full, empty, turn = given
    step, before = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0, q, hi = _place2(tile, counts, N, H, D_OUT, BM, BN, GROUP)
        steps = gl.cdiv(q * H, BK)
        if before % 2 == WHOSE:
            acc = accumulators(BM, BN)  # what began with b_out would be multiplied one product after the other
            wait_for_turn(turn, before // 2, WHOSE)
            acc = multiply_tile(acc, step, steps, a_s, b_s, full, empty, turn, WHOSE, SLOTS, TURNED)
            if b_out is None and residual is None:
                _write(y, acc, None, None, perm, counts, m0, n0, q, hi, stride_r, N, D_OUT, BM, BN)
            else:  # registers do not hold more than a quarter's beside the sums
                left, right = halves(acc, BM, BN)
                QUARTER: gl.constexpr = BN // 4
                for half in gl.static_range(2):
                    first, second = halves(right if half else left, BM, BN // 2)
                    n = n0 + 2 * half * QUARTER
                    _write(y, first, b_out, residual, perm, counts, m0, n, q, hi, stride_r, N, D_OUT, BM, QUARTER)
                    n += QUARTER
                    _write(y, second, b_out, residual, perm, counts, m0, n, q, hi, stride_r, N, D_OUT, BM, QUARTER)
        step += steps
        before += 1


@gluon.jit(do_not_specialize=["T"])
def layer2_kernel(
    y, a, w, b_out, residual, perm, counts, T, D_IN, stride_a, stride_w, stride_r,
    N: gl.constexpr, H: gl.constexpr, D_OUT: gl.constexpr, TURNED: gl.constexpr,
    SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """y [T, D_OUT] in token order, of all tokens; a sorted; w [D_OUT, N * H], or TURNED; b_out may be absent."""
    a_s = gl.allocate_shared_memory(a.dtype, [SLOTS, BM, BK], a.layout)
    b_s = gl.allocate_shared_memory(a.dtype, [SLOTS, BK, BN] if TURNED else [SLOTS, BN, BK], w.layout)
    full, empty, turn = make_barriers(SLOTS)
    _, _, _, _, _, _, _, tiles = find_band(0, counts, N, 0, N, 0, D_OUT, False, BM, BN)
    given = (y, b_out, residual, perm, counts, tiles, stride_r, a_s, b_s, full, empty, turn)
    gl.warp_specialize(
        [
            (_take2, (0, given, N, H, D_OUT, TURNED, SLOTS, BM, BN, BK, GROUP)),
            (_take2, (1, given, N, H, D_OUT, TURNED, SLOTS, BM, BN, BK, GROUP)),
            (_read2, (a, w, counts, tiles, a_s, b_s, full, empty, N, H, D_OUT, TURNED, SLOTS, BM, BN, BK, GROUP)),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, READER_REGISTERS],
    )
