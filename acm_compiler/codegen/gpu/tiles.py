"""Tiles of the kernels: a table by architecture, dtype, kind of layer and number of tokens; nothing is tuned.

Every row says where it comes from. A row that was timed on a device names the card, the versions and the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from acm_compiler.codegen.gpu.spec import KernelSpec
from acm_compiler.codegen.gpu.start import blocks_in

PROCESSORS = {80: 108, 90: 132, 100: 148}
"""Multiprocessors of the largest GPU of an architecture, where the GPU is not known."""
_ONE, _LEAST_BUCKET, _MOST_BUCKET = 0, 4, 20
_UNKNOWN_BUCKET = 11  # of as many tokens as a compiler traces as free: from here on kernels take any number of them

_COMPILED = (
    "compiled ahead of time for sm_{} by triton 3.8: no spills, as many CTAs per SM as r says; not timed on a device"
)
_IN_TURN = "the fastest of 11 kinds of kernels on an H200, torch 2.11, triton 3.6 (docs/results/h200.md)"
_OF_ONE = "among the fastest of 10 for each layer on an H200, torch 2.11, triton 3.6 (docs/results/h200.md)"
_TIMED = "the fastest of 15 to 20 pairs on an H100, torch 2.11, triton 3.6 (docs/results/h100.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows, columns and reduction step of one block of work, and how a kernel is built for it.

    `resident` CTAs are meant to share one multiprocessor; the grid is that many times their number. flat: loops over
    tiles and over the reduction are one, so that a tile's first loads start in the last one's end. turns: two groups of
    warps take tiles in turn (`codegen.gpu.turns`), stages are slots; n columns of each branch of a gated first layer.
    Written "128x128x64 w4 s3 r2", with " flat" or " turns" behind.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int
    flat: bool = False
    turns: bool = False

    def __str__(self) -> str:
        how = " flat" if self.flat else " turns" if self.turns else ""
        return f"{self.m}x{self.n}x{self.k} w{self.warps} s{self.stages} r{self.resident}{how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """One row of the table: tiles of both layers; `sorts`: tokens are sorted by k before.

    Where they are, the layers agree so that layer 2 reads only what layer 1 wrote. Else `splits` programs share the
    inner product of a block of outputs, and if there are several another kernel adds up their parts.
    """

    layer1: Tile
    layer2: Tile
    provenance: str
    sorts: bool = True
    splits: int = 1

    def __post_init__(self) -> None:
        agree = self.layer1.m == self.layer2.m and self.layer1.n % self.layer2.k == 0
        assert agree or not self.sorts, f"layer 2 ({self.layer2}) reads what layer 1 ({self.layer1}) has not written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Conditions of a row of the table: the oldest architecture, kind of dtype, kind of learners, most tokens.

    size: "", or "small" and "least" for calls to which the rows before give fewer tiles, in one of the layers, than
    there are processors.
    kind: plain, gated, sliced, narrow (plain, of a width that wide tiles would round up), few or few-gated (one block
    of tokens that need no sorting; the columns are the most, and are cut where programs would be too few), one (a
    single token, of learners that share one second layer).
    """

    arch: int
    dtype: str
    kind: str
    tokens: int | None
    tiles: Tiles
    size: str = ""

    def __str__(self) -> str:
        """The kind of call, as the table writes it."""
        most = f" {self.size}".rstrip() if self.tokens is None else f" <= {self.tokens}"
        return f"sm_{self.arch} {self.dtype} {self.kind}{most}"


def tile_of(text: str) -> Tile:
    """A tile written as m x n x k, w warps, s stages, r resident: "128x128x64 w4 s3 r2", perhaps "flat" or "turns"."""
    m, n, k, warps, stages, resident = (int(number) for number in re.findall(r"\d+", text))
    how = {"flat": text.endswith(" flat"), "turns": text.endswith(" turns")}
    return Tile(m=m, n=n, k=k, warps=warps, stages=stages, resident=resident, **how)


def _row(what: str, layer1: str, layer2: str, provenance: str = _COMPILED) -> Row:
    """A row for what is written as "sm_90 16 gated", with " small", " least" or " <= 64" behind."""
    words = what.split()
    arch = int(words[0].removeprefix("sm_"))
    return Row(
        arch=arch,
        dtype=words[1],
        kind=words[2],
        tokens=int(words[-1]) if "<=" in words else None,
        size=words[3] if len(words) == 4 else "",
        tiles=Tiles(
            layer1=tile_of(layer1),
            layer2=tile_of(layer2),
            provenance=provenance.format(arch),
            sorts=not words[2].startswith(("few", "one")),
        ),
    )


# of the rows of an architecture, dtype and kind, large tiles first, the first is taken that fills the machine
TABLE = (
    _row("sm_80 16 one <= 1", "1x2x512 w2 s1 r1", "1x2x512 w2 s1 r1", _OF_ONE),
    _row("sm_80 tf32 one <= 1", "1x2x256 w2 s1 r1", "1x2x256 w2 s1 r1"),
    _row("sm_80 fp32 one <= 1", "1x2x256 w2 s1 r1", "1x2x256 w2 s1 r1"),
    _row("sm_80 16 few-gated <= 16", "16x32x128 w4 s4 r1", "16x32x128 w4 s8 r1"),
    _row("sm_80 16 few <= 16", "16x32x128 w4 s7 r1", "16x32x128 w4 s8 r1"),
    _row("sm_80 16 few-gated <= 32", "32x32x128 w4 s4 r1", "32x64x128 w4 s4 r1"),
    _row("sm_80 16 few <= 32", "32x64x128 w4 s4 r1", "32x64x128 w4 s4 r1"),
    _row("sm_80 16 few-gated <= 64", "64x64x64 w4 s4 r1", "64x128x64 w4 s4 r1"),
    _row("sm_80 16 few <= 64", "64x64x64 w4 s6 r1", "64x128x64 w4 s4 r1"),
    _row("sm_80 tf32 few <= 16", "16x32x64 w4 s4 r1", "16x32x32 w4 s9 r1"),
    _row("sm_80 tf32 few <= 32", "32x32x64 w4 s4 r1", "32x32x64 w4 s6 r1"),
    _row("sm_80 tf32 few-gated <= 64", "64x32x32 w4 s5 r1", "64x64x32 w4 s4 r1"),
    _row("sm_80 tf32 few <= 64", "64x32x64 w4 s3 r1", "64x64x32 w4 s4 r1"),
    _row("sm_80 fp32 few <= 16", "16x32x32 w4 s3 r1", "16x32x32 w4 s4 r1"),
    _row("sm_80 fp32 few-gated <= 64", "64x32x32 w8 s3 r1", "64x32x32 w8 s4 r1"),
    _row("sm_80 fp32 few <= 64", "64x32x32 w4 s3 r1", "64x32x32 w8 s4 r1"),
    _row("sm_100 16 narrow", "128x64x64 w4 s3 r1", "128x128x64 w8 s3 r1"),
    _row("sm_100 16 narrow small", "64x64x64 w4 s3 r4", "64x64x64 w4 s3 r4"),
    _row("sm_100 16 plain", "128x128x64 w8 s3 r1", "128x128x64 w8 s3 r1"),
    _row("sm_100 16 plain small", "64x64x64 w4 s3 r4", "64x64x64 w4 s3 r4"),
    _row("sm_100 16 gated", "128x128x64 w8 s3 r1", "128x128x64 w8 s3 r1"),
    _row("sm_100 16 gated small", "64x64x64 w4 s3 r3", "64x64x64 w4 s3 r4"),
    _row("sm_90 16 narrow", "128x64x64 w4 s3 r3", "128x128x64 w4 s3 r2"),
    _row("sm_90 16 narrow small", "64x64x64 w4 s3 r4", "64x64x64 w4 s3 r4"),
    _row("sm_90 16 plain", "128x128x64 w4 s6 r1 turns", "128x128x64 w4 s6 r1 turns", _IN_TURN),
    _row("sm_90 16 plain", "128x128x64 w4 s3 r2 flat", "128x128x64 w4 s3 r2 flat", _TIMED),
    _row("sm_90 16 plain small", "64x128x64 w4 s4 r2 flat", "64x128x64 w4 s4 r2 flat", _TIMED),
    _row("sm_90 16 plain least", "64x128x64 w4 s4 r2", "64x64x128 w4 s4 r1", _TIMED),
    _row("sm_90 16 gated", "128x64x64 w4 s6 r1 turns", "128x128x64 w4 s6 r1 turns", _IN_TURN),
    _row("sm_90 16 gated", "128x128x64 w8 s4 r1", "128x128x64 w4 s3 r2 flat", _TIMED),
    _row("sm_90 16 gated small", "64x128x64 w8 s4 r1", "64x128x64 w8 s4 r2", _TIMED),
    _row("sm_90 16 gated least", "128x64x64 w8 s4 r1", "128x64x64 w8 s4 r2", _TIMED),
    _row("sm_90 16 sliced", "128x64x64 w4 s3 r3", "128x64x64 w4 s3 r3"),
    _row("sm_90 16 sliced small", "64x64x64 w4 s3 r4", "64x64x64 w4 s3 r4"),
    _row("sm_90 tf32 plain", "128x128x32 w4 s3 r2", "128x128x32 w8 s3 r1"),
    _row("sm_90 tf32 plain small", "64x64x32 w4 s3 r4", "64x64x32 w4 s3 r4"),
    _row("sm_90 tf32 gated", "128x128x32 w8 s3 r1", "128x128x32 w8 s3 r1"),
    _row("sm_90 tf32 gated small", "64x64x32 w4 s3 r3", "64x64x32 w4 s3 r4"),
    _row("sm_90 tf32 sliced", "64x64x32 w4 s3 r3", "64x64x32 w4 s3 r3"),
    _row("sm_80 16 narrow", "128x64x32 w4 s4 r2", "128x128x32 w8 s4 r1"),
    _row("sm_80 16 narrow small", "64x64x32 w4 s4 r3", "64x64x32 w4 s4 r3"),
    _row("sm_80 16 plain", "128x128x32 w4 s4 r2", "128x128x32 w8 s4 r1"),
    _row("sm_80 16 plain small", "64x64x32 w4 s4 r3", "64x64x32 w4 s4 r3"),
    _row("sm_80 16 gated", "128x64x32 w4 s3 r2", "128x128x32 w8 s4 r1"),
    _row("sm_80 16 gated small", "64x64x32 w4 s3 r2", "64x64x32 w4 s4 r2"),
    _row("sm_80 16 sliced", "128x64x32 w4 s4 r2", "128x64x32 w4 s4 r2"),
    _row("sm_80 16 sliced small", "64x64x32 w4 s4 r3", "64x64x32 w4 s4 r3"),
    _row("sm_80 tf32 plain", "64x64x32 w4 s3 r2", "64x64x32 w4 s3 r2"),
    _row("sm_80 tf32 gated", "64x64x32 w4 s3 r2", "64x64x32 w4 s3 r2"),
    _row("sm_80 tf32 sliced", "64x64x32 w4 s3 r2", "64x64x32 w4 s3 r2"),
    _row("sm_80 fp32 plain", "64x64x32 w8 s3 r2", "64x64x32 w8 s3 r2"),
    _row("sm_80 fp32 gated", "64x64x32 w8 s3 r2", "64x64x32 w8 s3 r2"),
    _row("sm_80 fp32 sliced", "64x64x32 w8 s3 r2", "64x64x32 w8 s3 r2"),
)
_LONG = ("softplus", "mish")  # activations of so many instructions that registers are spilled
_NARROW = 256
_SHORT = 256 << 10
_MOST_SPLITS = 8


def bucket_of(tokens: Any) -> int:
    """The bucket of a number of tokens, the power of two that it is rounded up to: one plan serves a bucket.

    One token has a bucket of its own, 2 to 16 have the next. The last has no end; a number that is traced as free gets
    a bucket whose kernels take any number.
    """
    if isinstance(tokens, int):
        return min(max((tokens - 1).bit_length(), _LEAST_BUCKET), _MOST_BUCKET) if tokens > 1 else _ONE
    likely = tokens.node.hint if tokens.node.has_hint() else None
    return _UNKNOWN_BUCKET if likely is None else max(bucket_of(int(likely)), _UNKNOWN_BUCKET)


def buckets() -> tuple[int, ...]:
    """All buckets."""
    return (_ONE, *range(_LEAST_BUCKET, _MOST_BUCKET + 1))


@lru_cache(maxsize=4096)
def choose_tiles(
    spec: KernelSpec, arch: int, tokens: int, processors: int | None = None, *, turns: bool = False
) -> Tiles:
    """The table's tiles for a call of that many tokens on compute capability arch (80, 90, ...).

    processors: how many the device has, if it is known. turns: two groups of warps may take tiles in turn.
    """
    if processors is None:
        processors = PROCESSORS[max(known for known in PROCESSORS if known <= arch)]
    dtype = ("tf32" if spec.tf32 else "fp32") if spec.dtype == "fp32" else "16"
    kind = {"gated": "gated", "rows": "sliced", "cols": "sliced"}.get(spec.form, "plain")
    kinds = {kind}
    if kind == "plain" and spec.width < _NARROW and spec.width % 128 != 0:
        kinds.add("narrow")
    if spec.second != "none":
        kinds |= {"few", f"few-{kind}"} | ({"one"} if spec.second == "shared" else set())
    rows = [row for row in TABLE if row.arch <= arch and row.dtype == dtype and row.kind in kinds]
    rows = [row for row in rows if row.tokens is None or tokens <= row.tokens]
    if not (turns and takes_turns(spec)):
        rows = [row for row in rows if not row.tiles.layer1.turns]
    if not rows[0].tiles.sorts:
        return rows[0].tiles if rows[0].kind == "one" else _cut(spec, rows[0].tiles, processors)
    first = rows[0]
    group = [row.tiles for row in rows if (row.arch, row.kind) == (first.arch, first.kind)]
    return next((tiles for tiles in group if _fewest(spec, tiles, tokens) >= processors), group[-1])


def takes_turns(spec: KernelSpec) -> bool:
    """True if both layers' operands can be read in blocks, and epilogues do not take more registers than there are."""
    read = all(columns * spec.itemsize % 16 == 0 for columns in (spec.d_in, spec.learners * spec.width))
    return spec.itemsize == 2 and spec.second == "shared" and spec.act not in _LONG and read


def _fewest(spec: KernelSpec, tiles: Tiles, tokens: int) -> int:
    """Number of tiles in the layer that has fewer."""
    columns = [(tiles.layer2, spec.d_out)]
    if spec.second != "none":
        columns.append((tiles.layer1, spec.learners * spec.width))
    return min(blocks_in(tokens, tile.m) * blocks_in(width, tile.n) for tile, width in columns)


def _cut(spec: KernelSpec, tiles: Tiles, processors: int) -> Tiles:
    """Tiles for few tokens that give every processor a program, if they can: narrower ones, and split sums.

    A launch that adds up parts costs some 2 us, in which one program reads _SHORT bytes; so sums are split where
    programs are few and long.
    """
    rows, least = tiles.layer1.m, max(16, tiles.layer1.m // 2)
    first = tiles.layer1
    while first.n > least and blocks_in(spec.learners * spec.width, first.n) < processors:
        first = replace(first, n=first.n // 2)
    widths = [n for n in (128, 64, 32, 16) if least <= n <= tiles.layer2.n]
    blocks = {n: blocks_in(spec.d_out, n) for n in widths}
    whole = next((n for n in widths if n >= rows and 8 * blocks[n] >= 7 * processors), None)
    length = spec.learners * spec.width + (spec.d_in if spec.form == "linear" and spec.second == "top" else 0)
    if whole is None and (least + rows) * length * spec.itemsize <= _SHORT:
        whole = least
    if whole is not None:
        return replace(tiles, layer1=first, layer2=replace(tiles.layer2, n=whole))
    wide = next((n for n in widths if blocks[n] * _MOST_SPLITS >= processors), least)
    splits = min(processors // blocks[wide], _MOST_SPLITS, blocks_in(length, tiles.layer2.k))
    return replace(tiles, layer1=first, layer2=replace(tiles.layer2, n=wide), splits=max(1, splits))
