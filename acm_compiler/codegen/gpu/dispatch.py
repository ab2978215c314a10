"""From k of every token to the order in which kernels visit them: a stable counting sort, descending, on the device.

The whole schedule is the permutation and N + 1 counts, c_n = #{tokens with k >= n}; nothing returns to the host.
Rows that layers cannot read in place are copied: in sorted order, normalised, or both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acm_compiler.acm.reference import Norm
from acm_compiler.codegen.gpu.blocks import kernel_options
from acm_compiler.codegen.gpu.start import Launcher, blocks_in
from acm_compiler.codegen.gpu.tiles import bucket_of

_COUNTED = 64  # tokens per row of the histogram
_PLACED = 256  # tokens per program of the sort
_CHUNK = 8192  # numbers of the histogram that a program holds at once
_MANY = 1 << 18  # from here on four times as many: each program reads the whole histogram


class Order(NamedTuple):
    """perm [T]: tokens by k, descending, equal ones in their order; counts [>= N + 1]: counts[n] = c_n; int32."""

    perm: Tensor
    counts: Tensor


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


@triton.jit(do_not_specialize=["T", "BLOCKS", "PER"])
def place_kernel(
    perm, counts, k, histogram, T, BLOCKS, PER, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Sort BLOCK = PER histogram rows of tokens; every program sums the small histogram anew, which saves a launch."""
    program = tl.program_id(0)
    slots = tl.arange(0, SLOTS)
    total = tl.zeros((SLOTS,), tl.int32)
    before = tl.zeros((SLOTS,), tl.int32)
    for first in range(0, BLOCKS, CHUNK):
        block = first + tl.arange(0, CHUNK)
        part = tl.load(histogram + block[:, None] * SLOTS + slots[None, :], mask=(block < BLOCKS)[:, None], other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where((block < program * PER)[:, None], part, 0), 0)
    start = T - tl.cumsum(total, 0)
    tokens = program * BLOCK + tl.arange(0, BLOCK)
    real = tokens < T
    mine = tl.load(k + tokens, mask=real, other=0).to(tl.int32)
    is_slot = ((mine[:, None] == slots[None, :]) & real[:, None]).to(tl.int32)
    rank = (start + before)[None, :] + tl.cumsum(is_slot, 0) - 1
    tl.store(perm + tl.sum(is_slot * rank, 1), tokens, mask=real)
    if program == 0:
        tl.store(counts + slots, start + total)


class Sort:
    """Launches that sort the tokens of a bucket: count and place, or place alone where a gate wrote the histogram."""

    def __init__(self, learners: int, bucket: int) -> None:
        self._slots = slots = slots_of(learners)
        constants = {"N": learners, "SLOTS": slots, "BLOCK": _COUNTED}
        self._count = Launcher(count_kernel, constants, kernel_options(warps=2))
        constants = place_constants(learners, 1 << bucket)
        self._placed = constants["BLOCK"]
        self._place = Launcher(place_kernel, constants, kernel_options(warps=4))

    def __call__(self, k_T: Tensor, histogram: Histogram | None = None) -> Order:
        """The order of T >= 1 tokens; histogram: theirs, where a gate wrote it."""
        tokens, slots = k_T.shape[0], self._slots
        perm = k_T.new_empty(tokens, dtype=torch.int32)
        counts = k_T.new_empty(slots, dtype=torch.int32)
        if histogram is None:
            blocks = blocks_in(tokens, _COUNTED)
            histogram = Histogram(k_T.new_empty(blocks * slots, dtype=torch.int32), _COUNTED)
            self._count(blocks, histogram.counts, k_T, tokens)
        blocks, per = blocks_in(tokens, histogram.tokens), self._placed // histogram.tokens
        self._place(blocks_in(tokens, self._placed), perm, counts, k_T, histogram.counts, tokens, blocks, per)
        return Order(perm=perm, counts=counts)


def place_constants(learners: int, tokens: int) -> dict[str, int]:
    """Constants of `place_kernel` for so many tokens; of few it reads the whole histogram at once."""
    slots, rows = slots_of(learners), tokens // 32  # gates write rows for 32 tokens and more
    placed = _PLACED if tokens <= _MANY else 4 * _PLACED
    return {"SLOTS": slots, "BLOCK": placed, "CHUNK": min(max(rows, _COUNTED), _CHUNK // slots)}


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
