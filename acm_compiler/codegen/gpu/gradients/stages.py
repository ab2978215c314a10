"""Stages of a backward: its products, tiles, parts and constants. No tensors here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton

from acm_compiler.codegen.gpu.spec import KernelSpec
from acm_compiler.codegen.gpu.stages import (
    ROW_TILES,
    Loads,
    Machine,
    Product,
    build_options,
    is_aligned,
    kernel_options,
    loads_of,
    tile_constants,
)
from acm_compiler.codegen.gpu.tiles import Tile, Tiles, choose_tiles, takes_turns, tile_of

_MOST_PARTS = 16
_PART_TOKENS = 2048  # products of so many tokens take as long as writing and adding up their sums, once more
_LEAST_TOKENS = 128  # fewer are sorted, too
_WEIGHTS = {
    "turns": "128x128x64 w4 s6 r1 turns",
    "bulk": "128x128x64 w4 s3 r2",
    "16": "64x64x32 w4 s2 r3",
    "fp32": "32x32x32 w4 s2 r2",
}
SUMS = tile_of("1x64x32 w4 s3 r8")
"""Blocks of columns and of rows of `sums_kernel`."""
_WIDE = 128 * 64  # elements of a tile of which four warps could not hold both products
_ROWS, _ROW_BYTES = 8, 512  # of a block of branches
# activations, and types, whose derivative beside sums and kept values would spill 14 to 184 times
_LONG = ("gelu", "fp16"), ("hardswish", "bf16"), ("hardswish", "fp16")
_TOTAL = 512  # numbers that a program adds up
_BIASES, _SUMMED = 64, 16  # columns and rows of a block of parts of them


def first_spec(spec: KernelSpec) -> KernelSpec:
    """One branch of the first layer, without an activation, and its transpose as a second layer."""
    return replace(spec, form="mlp", act="identity", d_out=spec.d_in, residual=False, second="shared")


def second_spec(spec: KernelSpec) -> KernelSpec:
    """The second layer's transpose, as a first layer without an activation."""
    return replace(first_spec(spec), d_in=spec.d_out, bias_in=False)


def branches_of(spec: KernelSpec) -> tuple[str, ...]:
    """Names of the first layer's matrices."""
    return ("w_in", "w_up") if spec.form == "gated" else ("w_in",)


def of_tokens(spec: KernelSpec, branch: str) -> Product:
    """The product that gives what a branch adds to gradients of tokens, a second layer without biases."""
    return Product(weight=branch, q_hi=spec.learners, bias=False)


def is_fused(spec: KernelSpec, *, apart: bool) -> bool:
    """True where one launch gives h and what reaches it, of the first layer's product and of what reaches h.

    Of types of 16 bits: with others registers do not hold both. apart: products were kept, or all are computed.
    """
    return spec.form == "mlp" and spec.itemsize == 2 and not apart


def reaches_in_turn(spec: KernelSpec, tile: Tile) -> bool:
    """True where the product that reaches a plain MLP's h is multiplied by act' of kept products in one launch."""
    fits = (spec.act, spec.dtype) not in _LONG and spec.act != "identity"
    return tile.turns and spec.form == "mlp" and fits and takes_turns(spec)


def product_tiles(spec: KernelSpec, machine: Machine, tokens: int, *, apart: bool) -> Tiles:
    """Tiles of the products that are layers: those of a forward of as many tokens.

    Where the first layer is fused, of a gated one's forward, whose first layer has two products in one launch, too;
    no group of warps has room for two, so that turns are taken by the others alone.
    """
    fused, tokens = is_fused(spec, apart=apart), max(tokens, _LEAST_TOKENS)
    like = replace(first_spec(spec), form="gated" if fused else "mlp")
    tiles = choose_tiles(like, machine.arch, tokens, machine.processors)
    turns = machine.turns and takes_turns(second_spec(spec))
    in_turns = choose_tiles(first_spec(spec), machine.arch, tokens, machine.processors, turns=turns)
    if in_turns.layer2.turns:
        tiles = replace(in_turns, layer1=tiles.layer1 if fused else in_turns.layer1)
    if fused:  # what is made of both products takes more registers than in a forward
        first = tiles.layer1
        wide: Any = {"warps": 8, "resident": 1} if first.m * first.n >= _WIDE else {}
        tiles = replace(tiles, layer1=replace(first, **wide))
    return tiles


def hidden_loads(spec: KernelSpec, machine: Machine) -> tuple[Loads, Loads]:
    """Loads of both products of `hidden`: of x and w_in, of dy and w_out."""
    of_x = loads_of(first_spec(spec), machine, None, in_order=True)
    return of_x, loads_of(second_spec(spec), machine, None, in_order=True, turned=True)


def hidden_constants(spec: KernelSpec, tile: Tile, loads: tuple[Loads, Loads], *, interpret: bool) -> dict[str, Any]:
    """Constants of `hidden_kernel`."""
    of_x, of_dy = loads
    common = tile_constants(spec, tile, interpret)
    del common["FLAT"]
    return {
        "N": spec.learners,
        "H": spec.width,
        "ROW": spec.hidden_row,
        "ACT": spec.act,
        "BIAS": spec.bias_in,
        "X_DESC": of_x.a_desc,
        "IN_DESC": of_x.w_desc,
        "DY_DESC": of_dy.a_desc,
        "OUT_DESC": of_dy.w_desc,
        "EVEN_IN": spec.d_in % tile.k == 0,
        "EVEN_OUT": spec.d_out % tile.k == 0,
        "SHORT": spec.dtype == "bf16",
        **common,
    }


def reached_constants(spec: KernelSpec, tile: Tile) -> dict[str, Any]:
    """Constants of `reached_kernel`."""
    return {
        "N": spec.learners,
        "H": spec.width,
        "ROW": spec.hidden_row,
        "ACT": spec.act,
        "SHORT": spec.dtype == "bf16",
        "SLOTS": tile.stages,
        "BM": tile.m,
        "BN": tile.n,
        "BK": tile.k,
        "GROUP": ROW_TILES,
    }


def hidden_options(spec: KernelSpec, tile: Tile, loads: tuple[Loads, Loads], machine: Machine) -> dict[str, int]:
    """Warps and stages of `hidden_kernel`: as of the product that may be pipelined less."""
    return min((build_options(spec, tile, load, machine) for load in loads), key=lambda found: found["num_stages"])


def biases_constants(spec: KernelSpec, rows: int) -> dict[str, Any]:
    """Constants of `biases_kernel`, for sums over tiles of so many rows."""
    return {"N": spec.learners, "H": spec.width, "ROWS": rows, "BN": _BIASES, "BK": _SUMMED}


def weights_loads(spec: KernelSpec, machine: Machine, wide: int) -> Loads:
    """Loads of both operands of `weights`, whose rows are summed over: bulk copies for types of 16 bits."""
    bulk = machine.bulk_copies and spec.itemsize == 2 and is_aligned(wide, spec)
    return Loads(gather=False, a_desc=bulk, w_desc=bulk)


def weights_tile(spec: KernelSpec, loads: Loads, *, turns: bool) -> Tile:
    """The tile of `weights`; compiled for sm_80 and sm_90 without spills. turns: if the layers' tiles are taken so."""
    tile = tile_of(_WEIGHTS["turns"])
    if turns and loads.a_desc and spec.width % max(tile.m, tile.n) == 0:
        return tile
    return tile_of(_WEIGHTS["bulk" if loads.a_desc else "fp32" if spec.dtype == "fp32" else "16"])


def weights_constants(
    spec: KernelSpec, tile: Tile, loads: Loads, split: int, *, turned: bool, interpret: bool
) -> dict[str, Any]:
    """Constants of `weights_kernel`."""
    return {
        "N": spec.learners,
        "H": spec.width,
        "ROW": spec.hidden_row,
        "SPLIT": split,
        "TURNED": turned,
        "DESC": loads.a_desc,
        "PRECISION": "tf32" if spec.tf32 else "ieee",
        "INTERPRET": interpret,
        "BM": tile.m,
        "BN": tile.n,
        "BK": tile.k,
    }


def branches_constants(spec: KernelSpec, *, every: bool, interpret: bool) -> dict[str, Any]:
    """Constants of `branches_kernel`."""
    return {
        "N": spec.learners,
        "H": spec.width,
        "ROW": spec.hidden_row,
        "ACT": spec.act,
        "EVERY": every,
        "SHORT": spec.dtype == "bf16",
        "INTERPRET": interpret,
        "BM": _ROWS,
        "BN": min(_ROW_BYTES // spec.itemsize, max(16, triton.next_power_of_2(spec.width))),
    }


def sums_constants(spec: KernelSpec, split: int) -> dict[str, Any]:
    """Constants of `sums_kernel`."""
    return {"N": spec.learners, "PER_K": spec.width, "SPLIT": split, "BN": SUMS.n, "BK": SUMS.k}


def total_constants(parts: int, size: int) -> dict[str, Any]:
    """Constants of `total_kernel`."""
    return {"PARTS": parts, "SIZE": size, "BN": _TOTAL}


def plain_options() -> dict[str, int]:
    """Warps of `branches_kernel` and of `total_kernel`."""
    return kernel_options(warps=4)


def sums_options() -> dict[str, int]:
    """Warps and stages of `sums_kernel`."""
    return kernel_options(warps=SUMS.warps, stages=SUMS.stages)


def parts_of(tiles: int, slots: int, tokens: int) -> int:
    """Programs that share the tokens of a tile of `weights`: what fills the last wave, less what it costs to add up."""

    def time(parts: int) -> float:
        waves = -(-tiles * parts // slots)
        return waves * slots / (tiles * parts) + (parts > 1) * parts * _PART_TOKENS / tokens

    return min(range(1, _MOST_PARTS + 1), key=time)


def parts_of_sums(tiles: int, slots: int) -> int:
    """Programs that share the tokens of a block of `sums`."""
    return max(1, min(_MOST_PARTS, slots // tiles))
