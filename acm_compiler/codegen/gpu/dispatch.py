"""From k of every token to the order in which kernels visit them: a stable counting sort, descending, on the device.

The whole schedule is the permutation and N + 1 counts, c_n = #{tokens with k >= n}; nothing returns to the host.
Rows that layers cannot read in place are copied: in sorted order, by the sort itself or later, normalised, or both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acm_compiler.acm.reference import Norm
from acm_compiler.codegen.gpu.blocks import kernel_options
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, is_tracing
from acm_compiler.codegen.gpu.tiles import bucket_of

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


def sort_by_k(k_T: Tensor, learners: int) -> Order:
    """The order of T >= 1 tokens."""
    return Sort(learners, bucket_of(k_T.shape[0]))(k_T)


def slots_of(learners: int) -> int:
    """Places for every k from 0 to N: the next power of two."""
    return max(2, triton.next_power_of_2(learners + 1))


_ELEMENTS = 4096  # of a program: with them its registers hold whole rows
_ROWS = 4
_WIDE = 8192


@triton.jit
def _normalised(value, here, weight, bias, eps, columns, D_IN: tl.constexpr, CENTRED: tl.constexpr):
    """LayerNorm (RMSNorm where not CENTRED) of whole rows [BM, PADDED], fp32; for rows far from zero the rounded mean
    is mended.
    """
    off = value
    if CENTRED:
        off = tl.where(here, off - (tl.sum(off, 1) / D_IN)[:, None], 0.0)
        off = tl.where(here, off - (tl.sum(off, 1) / D_IN)[:, None], 0.0)
    y = off * tl.rsqrt(tl.sum(off * off, 1) / D_IN + tl.cast(eps, tl.float32))[:, None]
    if weight is not None:
        y *= tl.load(weight + columns, mask=columns < D_IN, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        y += tl.load(bias + columns, mask=columns < D_IN, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["T", "eps"])
def permute_kernel(
    rows_out, x, perm, counts, norm_weight, norm_bias, T, stride_x, eps,
    D_IN: tl.constexpr, PADDED: tl.constexpr, SORTED: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """rows_out [T, D_IN] = x[perm] (SORTED: what runs no learner is left out) or x, with NORM normalised."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, PADDED)
    if SORTED:
        mine = rows < tl.load(counts + 1)
        token = tl.load(perm + rows, mask=mine, other=0).to(tl.int64)
    else:
        mine = rows < T
        token = rows.to(tl.int64)
    here = (columns < D_IN)[None, :]
    real = mine[:, None] & here
    value = tl.load(x + token[:, None] * stride_x + columns[None, :], mask=real, other=0.0)
    if NORM:
        value = _normalised(value.to(tl.float32), here, norm_weight, norm_bias, eps, columns, D_IN, CENTRED)
    at = rows_out + rows.to(tl.int64)[:, None] * D_IN + columns[None, :]
    tl.store(at, value.to(rows_out.dtype.element_ty), mask=real)


class Rows:
    """The launch that writes rows in sorted order (in_order), normalised where there is a norm, or both."""

    def __init__(self, d_in: int, *, in_order: bool, norm: Norm | None) -> None:
        self._d_in, self._in_order = d_in, in_order
        weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
        self._weight = None if weight is None else weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        self._eps = 0.0 if norm is None else norm.eps
        centred = norm is None or norm.centred
        constants = permute_constants(d_in, in_order=in_order, norm=norm is not None, centred=centred)
        self._rows = constants["BM"]
        self._start = Launcher(permute_kernel, constants, permute_options(d_in))

    def __call__(self, x_TD: Tensor, order: Order | None) -> Tensor:
        """The rows [T, D]; what runs no learner is not written."""
        tokens = x_TD.shape[0]
        rows = x_TD.new_empty(tokens, self._d_in)
        perm, counts = (order.perm, order.counts) if order is not None and self._in_order else (None, None)
        stride = x_TD.stride(0)
        programs = blocks_in(tokens, self._rows)
        self._start(programs, rows, x_TD, perm, counts, self._weight, self._bias, tokens, stride, self._eps)
        return rows


def permute_constants(d_in: int, *, in_order: bool, norm: bool, centred: bool) -> dict[str, Any]:
    """Constants of `permute_kernel`; in_order: rows are sorted."""
    padded = triton.next_power_of_2(d_in)
    rows = max(1, min(_ROWS, _ELEMENTS // padded)) if norm else _ROWS
    return {"D_IN": d_in, "PADDED": padded, "SORTED": in_order, "NORM": norm, "CENTRED": centred, "BM": rows}


def permute_options(d_in: int) -> dict[str, int]:
    """Warps: enough to hold a row in registers."""
    return kernel_options(warps=4 if d_in <= _WIDE else 32)
