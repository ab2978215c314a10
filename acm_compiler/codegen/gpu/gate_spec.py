"""One gate as its kernels see it, and the blocks that its first product is cut into. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.codegen.gpu.start import blocks_in
from acm_compiler.codegen.gpu.tiles import Tile
from acm_compiler.planning.decisions import PlannedSite

NARROWEST = 16
"""Rows or columns that a matrix product has at least."""
FEW = 64
"""Tokens, up to which programs have few rows and columns."""
_WIDEST = 256  # columns of the first product that a program takes at once
_WIDE = 128  # of those of wider gates, and of exact ones, whose operands need registers for their parts
_HEAVY = 1 << 18  # elements of the first weight, from which on its product is taken in parts
_SPAN = 512  # features of a part of few tokens
_SPAN_OF_ONE = 2048  # of one
_LEAST_SPAN = 256  # of more
_MOST_SPANS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """One gate as its kernel sees it: dtype of the tokens and of the gate itself, sizes, rule."""

    d_in: int
    width: int
    columns: int
    k_min: int
    rule: str
    dtype: str
    gate_dtype: str

    @property
    def is_exact(self) -> bool:
        """True if products are in fp32, of three tf32 parts."""
        return "fp32" in (self.dtype, self.gate_dtype)

    @property
    def is_odd(self) -> bool:
        """True if rows begin anywhere, so that Triton reads them value by value, which takes registers."""
        return self.d_in % 16 != 0

    @property
    def is_split(self) -> bool:
        """True if the first product is taken in parts, by more programs than there are blocks of rows."""
        return self.d_in * self.width >= _HEAVY


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Blocks of the first product: their tile; bulk: read by tensor descriptors; span: features of a part."""

    tile: Tile
    bulk: bool
    span: int


def gate_spec_of_site(site: PlannedSite, dtype: str) -> GateSpec:
    """The spec of a planned site's gate, in the type of its tokens, by the rule of a calibrated one."""
    kind = "fp32" if dtype == "tf32" else dtype
    return GateSpec(
        d_in=site.d_in,
        width=site.gate_width,
        columns=site.columns,
        k_min=site.k_min,
        rule="damage",
        dtype=kind,
        gate_dtype=kind,
    )


def cut_of(spec: GateSpec, tokens: int, machine: Machine, *, aligned: bool = True) -> Cut:
    """Blocks for about so many tokens; aligned: rows of x begin where bulk copies may.

    Rows that are read by pointers, and products of three parts, stay off wgmma, which takes 64: before Triton 3.7
    nothing orders asynchronous copies before it, and old ptxas gets its operands in registers wrong.
    """
    few = tokens <= FEW
    same = spec.dtype == spec.gate_dtype  # else a conversion ends in registers, too
    bulk = machine.bulk_copies and not few and not spec.is_exact and same and aligned and spec.d_in % 8 == 0
    if not spec.is_split:
        return Cut(tile=_whole_tile(spec, tokens, machine, bulk=bulk), bulk=bulk, span=spec.d_in)
    if tokens == 1:
        step = 256 if spec.is_exact else 512
        return Cut(tile=Tile(m=1, n=4, k=step, warps=2, stages=1, resident=1), bulk=False, span=_SPAN_OF_ONE)
    if few:
        step = (32 if spec.is_exact else 128) // (2 if spec.is_odd else 1)
        rows = min(32, padded_size(tokens))
        # of shorter steps more, so that as many bytes are on their way; what is converted waits in registers
        stages = 5 if spec.is_exact and (same or rows == NARROWEST) else 3
        return Cut(tile=Tile(m=rows, n=32, k=step, warps=4, stages=stages, resident=1), bulk=False, span=_SPAN)
    tile = _part_tile(spec, tokens, machine, bulk=bulk)
    tiles = blocks_in(tokens, tile.m) * blocks_in(spec.width, tile.n)
    spans = min(_MOST_SPANS, max(1, machine.processors * tile.resident // tiles), blocks_in(spec.d_in, _LEAST_SPAN))
    return Cut(tile=tile, bulk=bulk, span=blocks_in(spec.d_in, spans * tile.k) * tile.k)


def _whole_tile(spec: GateSpec, tokens: int, machine: Machine, *, bulk: bool) -> Tile:
    width = padded_size(spec.width)
    width = width if width <= (_WIDE if spec.is_exact else _WIDEST) else _WIDE
    if bulk:
        wide, alone = width > _WIDE, blocks_in(tokens, 64) <= machine.processors  # a program has its own processor
        step, warps = (32, 8) if wide else (64, 4)
        return Tile(m=64, n=width, k=step, warps=warps, stages=8 if alone else 4, resident=1)
    if tokens <= FEW and not spec.is_exact and not spec.is_odd:
        return Tile(m=NARROWEST, n=width, k=min(128, 8192 // width), warps=4, stages=4, resident=1)
    step = 64 // (2 if spec.is_exact else 1) // (2 if width > _WIDE else 1)
    if spec.is_odd and width >= _WIDE:
        step //= 2
    rows = 32 if spec.is_exact or width > _WIDE // 2 or machine.arch >= 90 else 64
    waits = spec.is_exact and spec.is_odd and width >= _WIDE  # values that are read one by one, in registers
    return Tile(m=min(rows, padded_size(tokens)), n=width, k=step, warps=4, stages=2 if waits else 3, resident=1)


def _part_tile(spec: GateSpec, tokens: int, machine: Machine, *, bulk: bool) -> Tile:
    width = min(padded_size(spec.width), _WIDEST)
    roomy = machine.arch < 120
    if bulk and roomy and 2 * blocks_in(tokens, 128) * blocks_in(spec.width, width) >= machine.processors:
        return Tile(m=128, n=width, k=64, warps=8 if width > 64 else 4, stages=4, resident=1)
    width = min(width, _WIDE)
    if bulk:
        return Tile(m=128, n=width, k=64, warps=4, stages=3, resident=2)
    if spec.is_exact or spec.is_odd or machine.bulk_copies:
        step = 16 if spec.is_exact else 32
        return Tile(m=32, n=width, k=step, warps=4, stages=2 if spec.is_exact and spec.is_odd else 3, resident=2)
    return Tile(m=64, n=width, k=64, warps=4, stages=3, resident=2)


def padded_size(number: int) -> int:
    """The power of two to which a side of a matrix product is padded."""
    return max(NARROWEST, triton.next_power_of_2(number))
