"""Gradients of a kept first layer, and of weights as `gradients.kernels` has them, by two groups of warps in turn."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from acm_compiler.codegen.gpu.activation import derive
from acm_compiler.codegen.gpu.blocks import find_band
from acm_compiler.codegen.gpu.layers import zero_beyond_k
from acm_compiler.codegen.gpu.turns.layers import place1, read1, write_tile
from acm_compiler.codegen.gpu.turns.pipeline import (
    GROUP_REGISTERS,
    GROUP_WARPS,
    READER_REGISTERS,
    accumulators,
    end_steps,
    give_turn,
    halves,
    make_barriers,
    multiply_steps,
    multiply_tile,
    read_blocks,
    store_layout,
    wait_for_turn,
)


@gluon.jit
def _half(pair, dtype: gl.constexpr):
    """The lower 16 bits of each number, read as that type, in fp32."""
    return pair.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _pairs(before, m0, n0, T, ROW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """BN / 2 columns from n0 on as the sums of a tile lie, two numbers in one, so that registers hold them beside."""
    left, _ = halves(accumulators(BM, BN), BM, BN)
    even, _ = gl.split(left.reshape([BM, BN // 4, 2]))
    layout: gl.constexpr = even.type.layout
    rows = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
    columns = n0 // 2 + gl.arange(0, BN // 4, gl.SliceLayout(0, layout))
    at = before.to(gl.pointer_type(gl.int32)) + rows.to(gl.int64)[:, None] * (ROW // 2) + columns[None, :]
    return gl.load(at, mask=(rows < T)[:, None] & (columns < ROW // 2)[None, :], other=0)


@gluon.jit
def _end_reached(
    acc, held, facts, m0, n0,
    N: gl.constexpr, H: gl.constexpr, ROW: gl.constexpr, ACT: gl.constexpr, SHORT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Write sums [BM, BN] times act', and their own sums over rows."""
    reached, sums, counts, T = facts
    even, odd = gl.split(acc.reshape([BM, BN // 2, 2]))
    even *= derive(_half(held, reached.dtype.element_ty), ACT, SHORT, False)
    odd *= derive(_half(held >> 16, reached.dtype.element_ty), ACT, SHORT, False)
    layout: gl.constexpr = acc.type.layout
    value = gl.convert_layout(gl.join(even, odd).reshape([BM, BN]), layout)
    rows = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
    columns = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
    value = zero_beyond_k(value, rows, columns, counts, m0 + BM, n0 + BN, N, H)
    write_tile(reached, value, m0, n0, T, ROW, BM, BN)
    if sums is not None:
        at = sums + (m0 // BM).to(gl.int64) * (N * H) + columns
        gl.store(at, gl.sum(value, 0), mask=columns < N * H)


@gluon.jit
def _take_reached(
    WHOSE: gl.constexpr, given,
    N: gl.constexpr, H: gl.constexpr, ROW: gl.constexpr, ACT: gl.constexpr, SHORT: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    reached, sums, before, counts, tiles, T, D_OUT, a_s, b_s, full, empty, turn = given
    steps = gl.cdiv(D_OUT, BK)
    own = 0
    for tile in range(gl.program_id(0) + WHOSE * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        m0, n0 = place1(tile, counts, N, H, BM, BN, GROUP)
        acc = accumulators(BM, BN)
        # read while the other group multiplies
        held, held_right = _pairs(before, m0, n0, T, ROW, BM, BN), _pairs(before, m0, n0 + BN // 2, T, ROW, BM, BN)
        wait_for_turn(turn, own, WHOSE)
        step = (2 * own + WHOSE) * steps
        acc = multiply_tile(acc, step, steps, a_s, b_s, full, empty, turn, WHOSE, SLOTS, True)
        left, right = halves(acc, BM, BN)
        facts = reached, sums, counts, T
        _end_reached(left, held, facts, m0, n0, N, H, ROW, ACT, SHORT, BM, BN // 2)
        _end_reached(right, held_right, facts, m0, n0 + BN // 2, N, H, ROW, ACT, SHORT, BM, BN // 2)
        own += 1


@gluon.jit(do_not_specialize=["T"])
def reached_kernel(
    reached, sums, before, dy, w_out, counts, T, D_OUT,
    N: gl.constexpr, H: gl.constexpr, ROW: gl.constexpr, ACT: gl.constexpr, SHORT: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """reached [T, ROW] = dy W_out act'(before), in sorted order, zeros behind what tokens run in the same tile.

    before [T, ROW]: x W_in + b_in, as layer 1 kept it. dy [T, D_OUT] sorted, w_out [D_OUT, N * H], by descriptors.
    sums [row tiles, N * H]: None, or `reached` summed over the rows of each tile, fp32.
    """
    a_s = gl.allocate_shared_memory(dy.dtype, [SLOTS, BM, BK], dy.layout)
    b_s = gl.allocate_shared_memory(dy.dtype, [SLOTS, BK, BN], w_out.layout)
    full, empty, turn = make_barriers(SLOTS)
    _, _, _, _, _, _, _, tiles = find_band(0, counts, N, 1, N, H, 0, False, BM, BN)
    given = (reached, sums, before, counts, tiles, T, D_OUT, a_s, b_s, full, empty, turn)
    gl.warp_specialize(
        [
            (_take_reached, (0, given, N, H, ROW, ACT, SHORT, SLOTS, BM, BN, BK, GROUP)),
            (_take_reached, (1, given, N, H, ROW, ACT, SHORT, SLOTS, BM, BN, BK, GROUP)),
            (
                read1,
                (dy, w_out, None, counts, tiles, D_OUT, a_s, b_s, full, empty, N, H, True, SLOTS, BM, BN, BK, GROUP),
            ),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, READER_REGISTERS],
    )


@gluon.jit
def _share(
    turn, counts, tiles, high, across, N: gl.constexpr, SPLIT: gl.constexpr, TURNED: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """(part, first row, first column, first token, end of the tokens) of a program's next share of a tile.

    Shares of learners that more tokens run come first; the programs take them from left to right, then from right to
    left, and so on, so that all multiply about as many blocks.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    item = turn * programs + (programs - 1 - program if turn % 2 else program)
    per = tiles // N
    n, rest = item // (per * SPLIT), item % (per * SPLIT)
    part, tile = rest // per, n * per + rest % per
    m0, n0 = (tile % high * BM, tile // high * BN) if TURNED else (tile // across * BM, tile % across * BN)
    run = gl.load(counts + n + 1)
    length = gl.cdiv(gl.cdiv(run, BK), SPLIT) * BK
    begin = gl.minimum(part * length, run)
    return part, m0, n0, begin, gl.minimum(begin + length, run)


@gluon.jit
def _shares(tiles, SPLIT: gl.constexpr):
    """Number of shares that this program takes."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    rounds, rest = tiles * SPLIT // programs, tiles * SPLIT % programs
    return rounds + ((programs - 1 - program if rounds % 2 else program) < rest).to(gl.int32)


@gluon.jit
def _read_weights(
    a, b, counts, tiles, high, across, a_s, b_s, full, empty, N: gl.constexpr, SPLIT: gl.constexpr,
    TURNED: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    step = 0
    for turn in range(0, _shares(tiles, SPLIT)):
        _, m0, n0, begin, end = _share(turn, counts, tiles, high, across, N, SPLIT, TURNED, BM, BN, BK)
        for first in range(begin, end, BK):
            read_blocks(a, b, None, first, m0, first, n0, step, a_s, b_s, full, empty, SLOTS)
            step += 1


@gluon.jit
def _cut(block, rows: gl.constexpr, columns: gl.constexpr, left):
    """Set rows of a block from `left` on to zero."""
    layout: gl.constexpr = store_layout(columns)
    real = gl.arange(0, rows, gl.SliceLayout(1, layout)) < left
    block.store(gl.where(real[:, None], block.load(layout), 0.0))


@gluon.jit
def _take_weights(
    WHOSE: gl.constexpr, given, N: gl.constexpr, M: gl.constexpr, SPLIT: gl.constexpr, TURNED: gl.constexpr,
    SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    parts, counts, tiles, high, across, WIDE, a_s, b_s, full, empty, turn = given
    step = 0
    for before in range(0, _shares(tiles, SPLIT)):
        part, m0, n0, begin, end = _share(before, counts, tiles, high, across, N, SPLIT, TURNED, BM, BN, BK)
        whole, left = (end - begin) // BK, (end - begin) % BK
        if before % 2 == WHOSE:
            wait_for_turn(turn, before // 2, WHOSE)
            token = multiply_steps(accumulators(BM, BN), step, whole, a_s, b_s, full, empty, SLOTS, True, True)
            acc = end_steps(token, step, whole, empty, SLOTS)
            if left > 0:  # rows of other tokens, which may hold anything
                slot = (step + whole) % SLOTS
                mbarrier.wait(full.index(slot), (step + whole) // SLOTS & 1)
                _cut(a_s.index(slot), BK, BM, left)
                _cut(b_s.index(slot), BK, BN, left)
                fence_async_shared()
                acc = warpgroup_mma(a_s.index(slot).permute((1, 0)), b_s.index(slot), acc)
                mbarrier.arrive(empty.index(slot), count=1)
            give_turn(turn, WHOSE)
            layout: gl.constexpr = acc.type.layout if parts.dtype.element_ty == gl.float32 else store_layout(BN)
            rows = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
            columns = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
            most, wide = (WIDE, M) if TURNED else (M, WIDE)
            at = parts + part.to(gl.int64) * M * WIDE + rows.to(gl.int64)[:, None] * wide + columns[None, :]
            out = gl.convert_layout(acc.to(parts.dtype.element_ty), layout)
            gl.store(at, out, mask=(rows < most)[:, None] & (columns < wide)[None, :])
        step += gl.cdiv(end - begin, BK)


@gluon.jit
def weights_kernel(
    parts, a, b, counts, WIDE,
    N: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr, TURNED: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """parts [SPLIT, N * H, WIDE], or TURNED [SPLIT, WIDE, N * H]: sums over the tokens that run each learner of a.T b.

    a, b: descriptors of blocks [BK, BM], [BK, BN] of sorted rows [T, ...], N * H numbers or more and WIDE, or TURNED
    the other way round. No tile has two learners: H is a multiple of BM and BN.
    """
    a_s = gl.allocate_shared_memory(a.dtype, [SLOTS, BK, BM], a.layout)
    b_s = gl.allocate_shared_memory(a.dtype, [SLOTS, BK, BN], b.layout)
    full, empty, turn = make_barriers(SLOTS)
    M: gl.constexpr = N * H
    high, across = gl.cdiv(WIDE if TURNED else M, BM), gl.cdiv(M if TURNED else WIDE, BN)
    tiles = high * across
    given = (parts, counts, tiles, high, across, WIDE, a_s, b_s, full, empty, turn)
    gl.warp_specialize(
        [
            (_take_weights, (0, given, N, M, SPLIT, TURNED, SLOTS, BM, BN, BK)),
            (_take_weights, (1, given, N, M, SPLIT, TURNED, SLOTS, BM, BN, BK)),
            (
                _read_weights,
                (a, b, counts, tiles, high, across, a_s, b_s, full, empty, N, SPLIT, TURNED, SLOTS, BM, BN, BK),
            ),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, READER_REGISTERS],
    )
