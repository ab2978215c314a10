"""From k of every token to the order in which kernels visit them: a stable counting sort, descending, on the device.

The whole schedule is the permutation and N + 1 counts, c_n = #{tokens with k >= n}; nothing returns to the host.
Rows that layers cannot read in place are copied in sorted order, by the sort itself or later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acm_compiler.codegen.gpu.blocks import kernel_options
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, is_tracing

_COUNTED = 64  # tokens per row of the histogram; a gate's rows have no more
_PLACED = 256  # tokens per program of the sort
_CHUNK = 8192  # numbers of the histogram that a program holds at once
_MANY = 1 << 18  # from here on four times as many: each program reads the whole histogram
_COPIED = (1 << 13, 16), (1 << 16, 64)  # most tokens, tokens per program of a sort that copies their rows, too
_VALUES = 1 << 14  # of those rows at once


class Order(NamedTuple):
    """perm [T]: tokens by k, descending, equal ones in their order; counts [>= N + 1]: counts[n] = c_n; int32.

    rows: those of x in that order, where they were copied; what runs no learner is not written.
    """

    perm: Tensor
    counts: Tensor
    rows: Tensor | None = None


class Histogram(NamedTuple):
    """Tokens with each k in blocks of so many `tokens`: int32 [blocks * slots]; a gate writes it beside k."""

    counts: Tensor
    tokens: int


# debug=True keeps the assertion: a k outside [0, N] stops the kernel instead of reading what is not there
@triton.jit(debug=True, do_not_specialize=["T"])
def count_kernel(histogram, k, T, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """histogram [blocks, SLOTS]: how many of each BLOCK tokens have each k."""
    block = tl.program_id(0)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, SLOTS)
    real = tokens < T
    mine = tl.load(k + tokens, mask=real, other=0).to(tl.int32)
    tl.device_assert((mine >= 0) & (mine <= N), "k outside [0, N]")
    is_slot = (mine[:, None] == slots[None, :]) & real[:, None]
    tl.store(histogram + block * SLOTS + slots, tl.sum(is_slot.to(tl.int32), 0))


@triton.jit(do_not_specialize=["T", "ROWS", "PER"])
def place_kernel(
    perm, counts, rows_out, k, histogram, x, T, ROWS, PER, stride_x, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    LOOK: tl.constexpr, CHUNK: tl.constexpr, D_IN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sort BLOCK tokens; every program sums the small histogram, ROWS of PER tokens, anew, which saves a launch.

    LOOK: no less than PER where a row of the histogram may have tokens of several programs, else 0.
    rows_out [T, D_IN], unless absent: x [T, D_IN] in that order, COLUMNS at a time; what runs no learner is left out.
    """
    own = tl.program_id(0) * BLOCK
    slots = tl.arange(0, SLOTS)
    tokens = own + tl.arange(0, BLOCK)
    real = tokens < T
    mine = tl.load(k + tokens, mask=real, other=0).to(tl.int32)
    total = tl.zeros((SLOTS,), tl.int32)
    before = tl.zeros((SLOTS,), tl.int32)
    for first in range(0, ROWS, CHUNK):
        row = first + tl.arange(0, CHUNK)
        part = tl.load(histogram + row[:, None] * SLOTS + slots[None, :], mask=(row < ROWS)[:, None], other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where((row < own // PER)[:, None], part, 0), 0)
    if LOOK > 0:
        others = own // PER * PER + tl.arange(0, LOOK)
        theirs = tl.load(k + others, mask=others < own, other=-1).to(tl.int32)
        before += tl.sum((theirs[:, None] == slots[None, :]).to(tl.int32), 0)
    start = T - tl.cumsum(total, 0)
    is_slot = ((mine[:, None] == slots[None, :]) & real[:, None]).to(tl.int32)
    rank = tl.sum(is_slot * ((start + before)[None, :] + tl.cumsum(is_slot, 0) - 1), 1)
    tl.store(perm + rank, tokens, mask=real)
    if own == 0:
        tl.store(counts + slots, start + total)
    if rows_out is not None:
        runs = (mine > 0)[:, None]
        for column in range(0, D_IN, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = runs & (columns < D_IN)[None, :]
            values = tl.load(x + tokens.to(tl.int64)[:, None] * stride_x + columns[None, :], mask=mask, other=0.0)
            tl.store(rows_out + rank.to(tl.int64)[:, None] * D_IN + columns[None, :], values, mask=mask)


class Sort:
    """Launches that sort the tokens of a bucket: count and place, or place alone where a gate wrote the histogram.

    d_in: of rows that are copied in that order on the way, as far as that pays.
    """

    def __init__(self, learners: int, bucket: int, *, d_in: int | None = None) -> None:
        self._slots = slots = slots_of(learners)
        constants: dict[str, Any] = {"N": learners, "SLOTS": slots, "BLOCK": _COUNTED}
        self._count = Launcher(count_kernel, constants, kernel_options(warps=2))
        self.copies = d_in is not None and sort_copies(1 << bucket) and not is_tracing()
        constants = place_constants(learners, 1 << bucket, d_in=d_in if self.copies else None)
        self._placed = constants["BLOCK"]
        self._place = Launcher(place_kernel, constants, place_options(copies=self.copies))

    def __call__(self, k_T: Tensor, histogram: Histogram | None = None, x_TD: Tensor | None = None) -> Order:
        """The order of T >= 1 tokens; histogram: theirs, where a gate wrote it; x: rows that may be copied."""
        tokens, slots = k_T.shape[0], self._slots
        perm = k_T.new_empty(tokens, dtype=torch.int32)
        counts = k_T.new_empty(slots, dtype=torch.int32)
        if histogram is None:
            blocks = blocks_in(tokens, _COUNTED)
            histogram = Histogram(k_T.new_empty(blocks * slots, dtype=torch.int32), _COUNTED)
            self._count(blocks, histogram.counts, k_T, tokens)
        in_histogram = blocks_in(tokens, histogram.tokens), histogram.tokens
        rows, stride, x_TD = None, 0, x_TD if self.copies else None
        if x_TD is not None:
            rows, stride = x_TD.new_empty(x_TD.shape), x_TD.stride(0)
        programs = blocks_in(tokens, self._placed)
        self._place(programs, perm, counts, rows, k_T, histogram.counts, x_TD, tokens, *in_histogram, stride)
        return Order(perm, counts, rows)


def place_constants(learners: int, tokens: int, *, d_in: int | None = None) -> dict[str, Any]:
    """Constants of `place_kernel` for so many tokens; the histogram of few is read at once. d_in: of rows to copy."""
    slots, rows = slots_of(learners), tokens // 32  # gates write rows for 32 tokens and more
    sort = {"SLOTS": slots, "CHUNK": min(max(rows, _COUNTED), _CHUNK // slots)}
    if d_in is None:
        return sort | {"BLOCK": _PLACED if tokens <= _MANY else 4 * _PLACED, "LOOK": 0, "D_IN": 0, "COLUMNS": 0}
    placed = next(block for most, block in _COPIED if tokens <= most)
    columns = min(_VALUES // placed, triton.next_power_of_2(d_in))
    return sort | {"BLOCK": placed, "LOOK": _COUNTED if placed < _COUNTED else 0, "D_IN": d_in, "COLUMNS": columns}


def sort_copies(tokens: int) -> bool:
    """True if a sort of so many tokens may copy rows on the way."""
    return tokens <= _COPIED[-1][0]


def place_options(*, copies: bool) -> dict[str, int]:
    """Warps of `place_kernel`."""
    return kernel_options(warps=8 if copies else 4)


def slots_of(learners: int) -> int:
    """Places for every k from 0 to N: the next power of two."""
    return max(2, triton.next_power_of_2(learners + 1))


_ROWS = 4
_WIDE = 8192


@triton.jit
def permute_kernel(rows_out, x, perm, counts, stride_x, D_IN: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr):
    """rows_out [T, D_IN] = x[perm]; what runs no learner is left out."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, PADDED)
    mine = rows < tl.load(counts + 1)
    token = tl.load(perm + rows, mask=mine, other=0).to(tl.int64)
    real = mine[:, None] & (columns < D_IN)[None, :]
    value = tl.load(x + token[:, None] * stride_x + columns[None, :], mask=real, other=0.0)
    tl.store(rows_out + rows.to(tl.int64)[:, None] * D_IN + columns[None, :], value, mask=real)


class Rows:
    """The launch that writes rows in sorted order."""

    def __init__(self, d_in: int) -> None:
        self._start = Launcher(permute_kernel, permute_constants(d_in), permute_options(d_in))

    def __call__(self, x_TD: Tensor, order: Order) -> Tensor:
        """The rows [T, D]; what runs no learner is not written."""
        rows = x_TD.new_empty(x_TD.shape)
        self._start(blocks_in(x_TD.shape[0], _ROWS), rows, x_TD, order.perm, order.counts, x_TD.stride(0))
        return rows


def permute_constants(d_in: int) -> dict[str, Any]:
    """Constants of `permute_kernel`."""
    return {"D_IN": d_in, "PADDED": triton.next_power_of_2(d_in), "BM": _ROWS}


def permute_options(d_in: int) -> dict[str, int]:
    """Warps: enough to hold a row in registers."""
    return kernel_options(warps=4 if d_in <= _WIDE else 32)
