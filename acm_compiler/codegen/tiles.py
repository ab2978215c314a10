"""Which tiles the kernels use: a table by architecture, dtype, kind of layer and number of tokens; nothing is tuned.

Every row says where it comes from. A row that was timed on a device names the card, the versions and the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from acm_compiler.codegen.spec import KernelSpec

FEW_TOKENS = 64
"""Up to this many tokens nothing is sorted."""
SOME_TOKENS = 2048
"""Up to this many tokens tiles are small, so that more of them exist than the device has processors."""

_COMPILED = "compiled ahead of time, triton 3.8: no spills, as many CTAs per SM as stated; not timed on a device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows, columns and reduction step of one block of work, and how a kernel is built for it.

    `resident` CTAs are meant to share one multiprocessor; the grid is that many times their number.
    Written "128x128x64 w4 s3 r2".
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} w{self.warps} s{self.stages} r{self.resident}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """One row of the table: tiles of both layers. The layers agree so that layer 2 reads only what layer 1 wrote."""

    layer1: Tile
    layer2: Tile
    provenance: str

    def __post_init__(self) -> None:
        assert self.layer1.m == self.layer2.m and self.layer1.n % self.layer2.k == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a row of the table is for: the oldest architecture, kind of dtype, gated or not, narrow, most tokens."""

    arch: int
    dtype: str
    gated: bool
    narrow: bool
    tokens: int | None
    tiles: Tiles

    def __str__(self) -> str:
        """The kind of call, as the table writes it: "sm_90 16 gated <= 2048"."""
        words = [f"sm_{self.arch}", self.dtype, *["gated"] * self.gated, *["narrow"] * self.narrow]
        return " ".join([*words, *([] if self.tokens is None else ["<=", str(self.tokens)])])


def _tile(text: str) -> Tile:
    """A tile written as m x n x k, w warps, s stages, r resident: "128x128x64 w4 s3 r2"."""
    shape, warps, stages, resident = text.split()
    m, n, k = (int(part) for part in shape.split("x"))
    return Tile(m=m, n=n, k=k, warps=int(warps[1:]), stages=int(stages[1:]), resident=int(resident[1:]))


def _row(kind: str, layer1: str, layer2: str, provenance: str = _COMPILED) -> Row:
    """A row whose kind is written as "sm_90 16 gated narrow <= 2048"."""
    words = kind.split()
    return Row(
        arch=int(words[0].removeprefix("sm_")),
        dtype=words[1],
        gated="gated" in words,
        narrow="narrow" in words,
        tokens=int(words[-1]) if "<=" in words else None,
        tiles=Tiles(layer1=_tile(layer1), layer2=_tile(layer2), provenance=provenance),
    )


# the first row that fits is taken
TABLE = (
    _row("sm_90 16 <= 2048", "64x64x64 w4 s3 r4", "64x64x64 w4 s3 r4"),
    _row("sm_90 16 gated <= 2048", "64x64x64 w4 s3 r3", "64x64x64 w4 s3 r4"),
    _row("sm_90 16 narrow", "128x64x64 w4 s3 r3", "128x128x64 w4 s3 r2"),
    _row("sm_90 16", "128x128x64 w4 s3 r2", "128x128x64 w4 s3 r2"),
    _row("sm_90 16 gated", "128x128x64 w8 s3 r1", "128x128x64 w4 s3 r2"),
    _row("sm_90 tf32 <= 2048", "64x64x32 w4 s3 r4", "64x64x32 w4 s3 r4"),
    _row("sm_90 tf32 gated <= 2048", "64x64x32 w4 s3 r3", "64x64x32 w4 s3 r4"),
    _row("sm_90 tf32", "128x128x32 w4 s3 r2", "128x128x32 w8 s3 r1"),
    _row("sm_90 tf32 gated", "128x128x32 w8 s3 r1", "128x128x32 w8 s3 r1"),
    _row("sm_80 16 <= 2048", "64x64x32 w4 s4 r3", "64x64x32 w4 s4 r3"),
    _row("sm_80 16 gated <= 2048", "64x64x32 w4 s3 r2", "64x64x32 w4 s4 r2"),
    _row("sm_80 16 narrow", "128x64x32 w4 s4 r2", "128x128x32 w8 s4 r1"),
    _row("sm_80 16", "128x128x32 w4 s4 r2", "128x128x32 w8 s4 r1"),
    _row("sm_80 16 gated", "128x64x32 w4 s3 r2", "128x128x32 w8 s4 r1"),
    _row("sm_80 tf32", "64x64x32 w4 s3 r2", "64x64x32 w4 s3 r2"),
    _row("sm_80 tf32 gated", "64x64x32 w4 s3 r2", "64x64x32 w4 s3 r2"),
    _row("sm_80 fp32", "64x64x32 w8 s3 r2", "64x64x32 w8 s3 r2"),
    _row("sm_80 fp32 gated", "64x64x32 w8 s3 r2", "64x64x32 w8 s3 r2"),
)
_NARROW = 256


def choose_tiles(spec: KernelSpec, arch: int, tokens: int) -> Tiles:
    """The table's tiles for a call of that many tokens on compute capability arch (80, 90, ...)."""
    dtype = ("tf32" if spec.tf32 else "fp32") if spec.dtype == "fp32" else "16"
    gated, narrow = spec.form == "gated", spec.width < _NARROW and spec.width % 128 != 0
    for row in TABLE:
        fits = row.arch <= arch and row.dtype == dtype and row.gated == gated
        if fits and (narrow or not row.narrow) and (row.tokens is None or tokens <= row.tokens):
            return row.tiles
    raise AssertionError(f"no tiles for {spec} on sm_{arch}")
