"""Gradients of weights as `gradients.kernels` has them, by two groups of warps in turn."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from acm_compiler.codegen.gpu.turns.pipeline import (
    GROUP_REGISTERS,
    GROUP_WARPS,
    READER_REGISTERS,
    accumulators,
    end_steps,
    give_turn,
    make_barriers,
    multiply_steps,
    read_blocks,
    store_layout,
    wait_for_turn,
)


@gluon.jit
def _share(
    item, counts, tiles, across, SPLIT: gl.constexpr, TURNED: gl.constexpr, H: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """(part, first row, first column, first token, end of the tokens) of a share of a tile of weights' gradients."""
    part, tile = item // tiles, item % tiles
    m0, n0 = tile // across * BM, tile % across * BN
    run = gl.load(counts + (n0 if TURNED else m0) // H + 1)
    length = gl.cdiv(gl.cdiv(run, BK), SPLIT) * BK
    begin = gl.minimum(part * length, run)
    return part, m0, n0, begin, gl.minimum(begin + length, run)


@gluon.jit
def _read_weights(
    a, b, counts, tiles, across, a_s, b_s, full, empty, SPLIT: gl.constexpr, TURNED: gl.constexpr, H: gl.constexpr,
    SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    step = 0
    for item in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        _, m0, n0, begin, end = _share(item, counts, tiles, across, SPLIT, TURNED, H, BM, BN, BK)
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
    WHOSE: gl.constexpr, given, M: gl.constexpr, SPLIT: gl.constexpr, TURNED: gl.constexpr, H: gl.constexpr,
    SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    parts, counts, tiles, across, WIDE, a_s, b_s, full, empty, turn = given
    step, before = 0, 0
    for item in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        part, m0, n0, begin, end = _share(item, counts, tiles, across, SPLIT, TURNED, H, BM, BN, BK)
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
            high, wide = (WIDE, M) if TURNED else (M, WIDE)
            at = parts + part.to(gl.int64) * M * WIDE + rows.to(gl.int64)[:, None] * wide + columns[None, :]
            out = gl.convert_layout(acc.to(parts.dtype.element_ty), layout)
            gl.store(at, out, mask=(rows < high)[:, None] & (columns < wide)[None, :])
        step += gl.cdiv(end - begin, BK)
        before += 1


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
    across = gl.cdiv(M if TURNED else WIDE, BN)
    tiles = gl.cdiv(WIDE if TURNED else M, BM) * across
    given = (parts, counts, tiles, across, WIDE, a_s, b_s, full, empty, turn)
    gl.warp_specialize(
        [
            (_take_weights, (0, given, M, SPLIT, TURNED, H, SLOTS, BM, BN, BK)),
            (_take_weights, (1, given, M, SPLIT, TURNED, H, SLOTS, BM, BN, BK)),
            (
                _read_weights,
                (a, b, counts, tiles, across, a_s, b_s, full, empty, SPLIT, TURNED, H, SLOTS, BM, BN, BK),
            ),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, READER_REGISTERS],
    )
