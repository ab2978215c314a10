"""D2DMoE's experts (arXiv 2310.04361) as a contender: kernels written anew to the schedule of its published ones.

Every expert has a list of its tokens. The first kernel gathers them, multiplies by the expert's columns and stores its
hidden values; the second multiplies these by the expert's part of the second layer and adds them to the tokens' rows by
atomic additions, or stores a row for every pair of token and expert, which a third kernel adds up. Programs are started
for as many tokens as there are for every expert; those beyond its list end at once.

Tiles are ours. In its favour: weights are read by bulk copies, programs beyond a list lie behind all others, the
activation is our short one, lists come from cumulative sums rather than from a sort, our gate stands for its router,
and outputs begin with b_out(k) in place of zeros and one more addition. Triton before 3.7 puts no fence between copies
of gathered rows and the products that read them, here as there: errors of outputs stand beside the times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acm_compiler.codegen.gpu.activation import INTERPRETED, activate
from acm_compiler.codegen.gpu.ahead.build import Kernel
from acm_compiler.codegen.gpu.ahead.forward import descriptor_type
from acm_compiler.codegen.gpu.blocks import kernel_options, load_block, multiply, raster, row_pointers
from acm_compiler.codegen.gpu.spec import DTYPES
from acm_compiler.codegen.gpu.stages import BULK_COPY_BYTES, ROW_TILES
from acm_compiler.codegen.gpu.start import blocks_in, blocks_of
from acm_compiler.codegen.gpu.tiles import Tile
from benchmarks.first_gpu_run.contenders import Site, gate_call

PUBLISHED = 128
"""Hidden columns of an expert in the paper's measurement of a ViT-B's time."""
FIRST = (
    "128x128x64 w4 s3 r2",
    "128x128x64 w8 s3 r1",
    "128x256x64 w8 s3 r1",
    "128x64x64 w4 s4 r2",
    "64x128x64 w4 s4 r2",
    "128x128x32 w4 s4 r2",
)
SECOND = (
    "128x128x64 w4 s3 r2",
    "128x128x64 w8 s4 r1",
    "128x256x64 w8 s3 r1",
    "64x128x64 w4 s4 r2",
    "64x256x64 w8 s3 r1",
    "128x128x32 w4 s4 r2",
)
_MERGED = 16, 256  # tokens and columns that a program adds up
_MERGES = kernel_options(warps=8)


@triton.jit(do_not_specialize=["T"])
def expert1_kernel(
    h, x, w_in, b_in, order, counts, T, D_IN, stride_x, H: tl.constexpr, ACT: tl.constexpr, BULK: tl.constexpr,
    EVEN: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """h [E, T, H] of each expert's tokens, order [E, T], counts [E] of which there are; w_in [E * H, D_IN]."""
    COLUMNS: tl.constexpr = (H + BN - 1) // BN
    expert = tl.program_id(1)
    count = tl.load(counts + expert)
    tiles = (count + BM - 1) // BM
    if tl.program_id(0) < tiles * COLUMNS:
        row, column = raster(tl.program_id(0), tiles, COLUMNS, GROUP)
        rows = row * BM + tl.arange(0, BM)
        columns = column * BN + tl.arange(0, BN)
        before = expert.to(tl.int64) * T
        x_at = row_pointers(x, tl.load(order + before + tl.minimum(rows, count - 1)), stride_x, BK)
        w_rows = expert * H + tl.minimum(columns, H - 1)
        w_at = w_in if BULK else row_pointers(w_in, w_rows, D_IN, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D_IN, BK):
            a = load_block(x, x_at, 0, k, D_IN, False, EVEN, BK)
            w = load_block(w_in, w_at, expert * H + column * BN, k, D_IN, BULK, EVEN, BK)
            acc = multiply(a, w, acc, "ieee", INTERPRET)
        acc += tl.load(b_in + w_rows).to(tl.float32)[None, :]
        value = activate(acc, ACT, SHORT, INTERPRET).to(h.dtype.element_ty)
        at = h + (before + rows)[:, None] * H + columns[None, :]
        tl.store(at, value, mask=(rows < count)[:, None] & (columns < H)[None, :])


@triton.jit(do_not_specialize=["T"])
def expert2_kernel(
    y, h, w_out, order, counts, T, E: tl.constexpr, H: tl.constexpr, D_OUT: tl.constexpr, ATOMIC: tl.constexpr,
    BULK: tl.constexpr, EVEN: tl.constexpr, INTERPRET: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """h times w_out [D_OUT, E * H], of each expert: added to its tokens' rows of y [T, D_OUT], or y [E, T, D_OUT]."""
    COLUMNS: tl.constexpr = (D_OUT + BN - 1) // BN
    expert = tl.program_id(1)
    count = tl.load(counts + expert)
    tiles = (count + BM - 1) // BM
    if tl.program_id(0) < tiles * COLUMNS:
        row, column = raster(tl.program_id(0), tiles, COLUMNS, GROUP)
        rows = row * BM + tl.arange(0, BM)
        columns = column * BN + tl.arange(0, BN)
        real = (rows < count)[:, None] & (columns < D_OUT)[None, :]
        before = expert.to(tl.int64) * T
        own = tl.minimum(rows, count - 1)
        h_at = h if BULK else row_pointers(h, before + own, H, BK)
        w_at = w_out if BULK else row_pointers(w_out + expert * H, tl.minimum(columns, D_OUT - 1), E * H, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, H, BK):
            a = load_block(h, h_at, expert * T + row * BM, k, H, BULK, EVEN, BK)
            first = expert * H + k if BULK else k
            w = load_block(w_out, w_at, column * BN, first, H, BULK, EVEN, BK)
            acc = multiply(a, w, acc, "ieee", INTERPRET)
        value = acc.to(y.dtype.element_ty)
        if ATOMIC:
            token = tl.load(order + before + own).to(tl.int64)
            tl.atomic_add(y + token[:, None] * D_OUT + columns[None, :], value, mask=real, sem="relaxed")
        else:
            tl.store(y + (before + rows)[:, None] * D_OUT + columns[None, :], value, mask=real)


@triton.jit(do_not_specialize=["T"])
def merge_kernel(
    y, parts, b_out, k_of, places, T, E: tl.constexpr, D_OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """y [T, D_OUT]: b_out(k), and of parts [E, T, D_OUT] the rows at a token's places [E, T]; -1: not run."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    here, real = rows < T, (rows < T)[:, None] & (columns < D_OUT)[None, :]
    k = tl.load(k_of + rows, mask=here, other=0)
    acc = tl.load(b_out + k[:, None] * D_OUT + columns[None, :], mask=real, other=0.0).to(tl.float32)
    for expert in range(E):
        before = tl.cast(expert, tl.int64) * T
        place = tl.load(places + before + rows, mask=here, other=-1)
        at = parts + (before + place)[:, None] * D_OUT + columns[None, :]
        acc += tl.load(at, mask=real & (place >= 0)[:, None], other=0.0).to(tl.float32)
    tl.store(y + rows.to(tl.int64)[:, None] * D_OUT + columns[None, :], acc.to(y.dtype.element_ty), mask=real)


class Lists(NamedTuple):
    """Tokens of every expert, [E, T], how many there are, [E], and the place of each token in each list or -1."""

    order: Tensor
    counts: Tensor
    places: Tensor


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A plain MLP's learners, each cut into experts of `width` hidden columns; `atomic`: how outputs are added up."""

    site: Site
    width: int
    atomic: bool
    first: Tile
    second: Tile

    def __str__(self) -> str:
        return f"D2DMoE, {self.count} x {self.width}, {'atomic' if self.atomic else 'merged'}"

    @property
    def count(self) -> int:
        """Number of experts, E."""
        return self.site.shape.learners * self.site.shape.width // self.width

    def __call__(self, k: Tensor) -> Tensor:
        """y [T, O] at a k for every token: lists and kernels, without a router."""
        lists = self.lists(k)
        return self.outputs(self.hidden(lists), k, lists)

    def with_router(self, k: Tensor) -> Callable[[], Tensor]:
        """Our gate for their router, its choice replaced by k, and the experts."""
        gate = gate_call(self.site)

        def call() -> Tensor:
            gate()
            return self(k)

        return call

    def lists(self, k: Tensor) -> Lists:
        """Lists of the experts that make up the first k learners."""
        tokens, device = len(k), k.device
        runs = k * (self.count // self.site.shape.learners) > torch.arange(self.count, device=device)[:, None]
        sums = runs.cumsum(1)
        places = torch.where(runs, sums - 1, -1)
        order = torch.empty(self.count, tokens + 1, dtype=torch.int32, device=device)
        numbers = torch.arange(tokens, dtype=torch.int32, device=device).expand_as(runs)
        order.scatter_(1, torch.where(runs, places, tokens), numbers)
        return Lists(order[:, :tokens].contiguous(), sums[:, -1].to(torch.int32), places.to(torch.int32))

    def hidden(self, lists: Lists) -> Tensor:
        """h [E, T, width] of tokens in the order of the lists."""
        x, tile = self.site.x, self.first
        h = x.new_empty(self.count, len(x), self.width)
        w_in = self._read(self._weights[0], tile)
        operands = h, x, w_in, self._weights[1], *lists[:2], len(x), x.shape[1], x.stride(0)
        self._start(expert1_kernel, operands, self.first_constants, tile, self.width)
        return h

    def outputs(self, h: Tensor, k: Tensor, lists: Lists) -> Tensor:
        """y [T, O] of the hidden values."""
        x, b_out, tile = self.site.x, self.site.weights.b_out, self.second
        o, w_out = b_out.shape[1], self._read(self._weights[2], tile)
        y = b_out[k.long()] if self.atomic else x.new_empty(self.count, len(x), o)
        y = y.float() if self.atomic and INTERPRETED else y  # the interpreter adds no bfloat16
        rows = blocks_of(h.flatten(0, 1), tile.m, tile.k) if self.is_bulk else h
        self._start(expert2_kernel, (y, rows, w_out, *lists[:2], len(x)), self.second_constants, tile, o)
        if self.atomic:
            return y.to(x.dtype)
        merged = x.new_empty(len(x), o)
        grid = blocks_in(len(x), _MERGED[0]), blocks_in(o, _MERGED[1])
        merge_kernel[grid](merged, y, b_out, k, lists.places, len(x), **self.merge_constants, **_MERGES)
        return merged

    @property
    def first_constants(self) -> dict[str, Any]:
        """Constants of `expert1_kernel`."""
        even = self.site.shape.d_in % self.first.k == 0
        short = self.site.x.dtype == torch.bfloat16
        return {"ACT": self.site.weights.act, "SHORT": short, "EVEN": even, **self._constants(self.first)}

    @property
    def second_constants(self) -> dict[str, Any]:
        """Constants of `expert2_kernel`."""
        even = self.width % self.second.k == 0
        facts = {"E": self.count, "D_OUT": self.site.shape.d_out, "ATOMIC": self.atomic, "EVEN": even}
        return facts | self._constants(self.second)

    @property
    def merge_constants(self) -> dict[str, Any]:
        """Constants of `merge_kernel`."""
        return {"E": self.count, "D_OUT": self.site.shape.d_out, "BM": _MERGED[0], "BN": _MERGED[1]}

    def _constants(self, tile: Tile) -> dict[str, Any]:
        sizes = {"BM": tile.m, "BN": tile.n, "BK": tile.k, "H": self.width, "GROUP": ROW_TILES}
        return {"BULK": self.is_bulk, "INTERPRET": INTERPRETED, **sizes}

    @property
    def is_bulk(self) -> bool:
        """True if weights can be read by bulk copies: rows are aligned, and no step goes beyond an expert."""
        rows = (size * self.site.x.itemsize for size in (self.site.shape.d_in, self.width))
        whole = self.width % self.second.k == 0
        return self.site.machine.bulk_copies and whole and all(row % BULK_COPY_BYTES == 0 for row in rows)

    @cached_property
    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        w = self.site.weights
        assert w.b_in is not None and w.w_out is not None
        return w.w_in.flatten(0, 1), w.b_in.flatten(), w.w_out.flatten(1)

    def _read(self, weights: Tensor, tile: Tile) -> Any:
        return blocks_of(weights, tile.n, tile.k) if self.is_bulk else weights

    def _start(self, kernel: Any, operands: tuple, constants: dict[str, Any], tile: Tile, columns: int) -> None:
        grid = blocks_in(len(self.site.x), tile.m) * blocks_in(columns, tile.n), self.count
        kernel[grid](*operands, **constants, **kernel_options(warps=tile.warps, stages=tile.stages))

    def built(self) -> list[Kernel]:
        """The kernels as they are compiled without a GPU."""
        dtype = DTYPES[self.site.x.dtype]
        operands = {"order": "*i32", "places": "*i32"}

        def of(name: str, kernel: Any, constants: dict[str, Any], tile: Tile, **rows: int) -> Kernel:
            blocks = rows if self.is_bulk else {}
            read = {own: descriptor_type(dtype, height, tile.k, turns=False) for own, height in blocks.items()}
            options = kernel_options(warps=tile.warps, stages=tile.stages)
            facts: Any = {"constants": constants, "options": options, "operands": operands | read, "tile": tile}
            return Kernel(name=name, function=kernel, **facts)

        kernels = [
            of("expert1", expert1_kernel, self.first_constants, self.first, w_in=self.first.n),
            of("expert2", expert2_kernel, self.second_constants, self.second, h=self.second.m, w_out=self.second.n),
        ]
        if not self.atomic:
            merge: Any = {"constants": self.merge_constants, "options": _MERGES, "operands": operands}
            kernels.append(Kernel(name="merge", function=merge_kernel, **merge))
        return kernels
