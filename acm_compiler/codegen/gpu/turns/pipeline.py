"""The ping-pong pipeline: one warp reads blocks from memory, two groups of warps take tiles in turn.

While one group multiplies, the other ends its tile: bias, activation, stores. Blocks lie in a ring of slots in shared
memory. Every slot has two barriers: `full`, once its two blocks have come, and `empty`, once they were multiplied; two
more, `turn`, say whose products may start. Both groups and the reading warp count all steps of a program, also those
that others take, so that each knows which slot holds a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_WARPS = 4
GROUP_WARPS = gl.constexpr(_WARPS)
"""Warps of one group."""
GROUP_REGISTERS = gl.constexpr(240)
READER_REGISTERS = gl.constexpr(24)
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.7


def described(matrix: Tensor, rows: int, columns: int) -> Any:
    """A matrix that these kernels read in blocks of so many rows and columns."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout_of(matrix.dtype, rows, columns))


def layout_of(dtype: torch.dtype, rows: int, columns: int) -> Any:
    """The layout in shared memory, as wgmma reads it, of blocks of that type."""
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


@gluon.jit
def make_barriers(SLOTS: gl.constexpr):
    """(full, empty, turn), initialised: a barrier of each kind for every slot, and one for each group."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    return full, empty, turn


@gluon.jit
def read_blocks(
    left, right, more, left_row, left_column, right_row, right_column, step,
    a_s, b_s, full, empty, SLOTS: gl.constexpr,
):  # fmt: skip
    """Read a step's blocks into its slot, once that is empty; `more`: a matrix whose block lies behind right's."""
    slot = step % SLOTS
    mbarrier.wait(empty.index(slot), (step // SLOTS & 1) ^ 1)
    bar = full.index(slot)
    SIZE: gl.constexpr = a_s.shape[1] * a_s.shape[2] + b_s.shape[1] * b_s.shape[2]
    mbarrier.expect(bar, SIZE * (a_s.dtype.primitive_bitwidth // 8))
    _copy(left, [left_row, left_column], bar, a_s.index(slot))
    if more is None:
        _copy(right, [right_row, right_column], bar, b_s.index(slot))
    else:
        HALF: gl.constexpr = b_s.shape[1] // 2
        _copy(right, [right_row, right_column], bar, b_s.index(slot).slice(0, HALF))
        _copy(more, [right_row, right_column], bar, b_s.index(slot).slice(HALF, HALF))


@gluon.jit
def wait_for_turn(turn, own, GROUP: gl.constexpr):
    """Wait until the other group has started all products of its tile; own: how many tiles this group had before."""
    mbarrier.wait(turn.index(GROUP), (own & 1) ^ (1 - GROUP))


@gluon.jit
def multiply_steps(
    acc, step, steps, a_s, b_s, full, empty, SLOTS: gl.constexpr, LEFT_TURNED: gl.constexpr,
    RIGHT_TURNED: gl.constexpr,
):  # fmt: skip
    """acc + the products of `steps` pairs of blocks from `step` on; the last may still run, in its slot.

    Blocks are [rows of acc, K] and [columns of acc, K]; TURNED: [K, rows], [K, columns].
    """
    token = warpgroup_mma_init(acc)
    for k in range(0, steps):
        slot = (step + k) % SLOTS
        mbarrier.wait(full.index(slot), (step + k) // SLOTS & 1)
        a, b = a_s.index(slot), b_s.index(slot)
        if LEFT_TURNED:
            a = a.permute((1, 0))
        if not RIGHT_TURNED:
            b = b.permute((1, 0))
        token = warpgroup_mma(a, b, token, is_async=True)
        token = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[token]))
        mbarrier.arrive(empty.index((step + k + SLOTS - 1) % SLOTS), count=1, pred=k > 0)
    return token


@gluon.jit
def end_steps(token, step, steps, empty, SLOTS: gl.constexpr):
    """The sums of `multiply_steps`, once its last product has ended."""
    acc = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(empty.index((step + steps + SLOTS - 1) % SLOTS), count=1, pred=steps > 0)
    return acc


@gluon.jit
def give_turn(turn, GROUP: gl.constexpr):
    """Let the other group start its products."""
    mbarrier.arrive(turn.index(1 - GROUP), count=1)


@gluon.jit
def multiply_tile(
    acc, step, steps, a_s, b_s, full, empty, turn, GROUP: gl.constexpr, SLOTS: gl.constexpr,
    RIGHT_TURNED: gl.constexpr,
):  # fmt: skip
    """acc + the products of `steps` pairs of blocks from `step` on; the other group starts before the last ends."""
    token = multiply_steps(acc, step, steps, a_s, b_s, full, empty, SLOTS, False, RIGHT_TURNED)
    give_turn(turn, GROUP)
    return end_steps(token, step, steps, empty, SLOTS)


@gluon.jit
def accumulators(BM: gl.constexpr, BN: gl.constexpr):
    """Zeros as products are added to, [BM, BN]."""
    return gl.zeros([BM, BN], gl.float32, accumulator_layout(BN))


@gluon.jit
def halves(acc, BM: gl.constexpr, BN: gl.constexpr):
    """The left and the right columns of sums [BM, BN]; no thread gives another anything."""
    return gl.split(acc.reshape([BM, 2, BN // 2]).permute((0, 2, 1)))


@gluon.constexpr_function
def accumulator_layout(columns):
    """The layout of what one group's products are added to."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def store_layout(columns):
    """A layout whose warps write whole lines: 8 numbers of 16 bits for every thread."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [_WARPS, 1], [1, 0])
