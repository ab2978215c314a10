"""Stages of a call of `acm::learners` on a GPU: its products, loads and constants. No tensors here.

Launching and compiling ahead of time read the same constants, so what is checked is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from acm_compiler.codegen.gpu.blocks import kernel_options
from acm_compiler.codegen.gpu.spec import KernelSpec
from acm_compiler.codegen.gpu.tiles import PROCESSORS, Tile

ROW_TILES = 8
"""Row tiles that a kernel visits before the next column tile."""
BULK_COPY_BYTES = 16
"""Alignment of addresses and rows that tensor descriptors need."""
_WGMMA_ROWS = 64
_FENCED = (3, 7)
_GLUON = (3, 6), (3, 9)
_WITH_WGMMA = 90
_SUMMED = 256  # columns of a token that one program adds up
_SORTED_ONLY = ("GATHER", "X_DESC", "W_DESC", "TURNED", "GROUP", "FLAT")


def puts_fences() -> bool:
    """True if the installed Triton orders cp.async before wgmma (from 3.7 on)."""
    return _triton_version() >= _FENCED


def takes_turns_on(arch: int) -> bool:
    """True if kernels written in Gluon run there: wgmma's, by a Triton whose Gluon they were built and tested with."""
    return arch == _WITH_WGMMA and _GLUON[0] <= _triton_version() <= _GLUON[1]


def _triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("triton").split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU: compute capability (80, 90, ...), multiprocessors, and whether gathered operands may feed wgmma.

    Triton before 3.7 puts no proxy fence between cp.async and wgmma: there `fenced` is False, rows are permuted
    first, and what still comes through pointers is not pipelined. turns: groups of warps may take tiles in turn.
    """

    arch: int
    processors: int
    fenced: bool = True
    turns: bool = False

    @property
    def bulk_copies(self) -> bool:
        """True if tensor descriptors are worth it (TMA)."""
        return self.arch >= 90


def machine_of_arch(arch: int) -> Machine:
    """The largest GPU of that architecture, with the Triton that is installed."""
    processors = PROCESSORS[max(known for known in PROCESSORS if known <= arch)]
    return Machine(arch=arch, processors=processors, fenced=puts_fences(), turns=takes_turns_on(arch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One launch of layer 2: tokens with k in [q_lo, q_hi], `weight` the name of its matrix in Weights.

    own: no tile serves two k; reduce: how long the inner product is; stacked: one matrix per k; from_x: it reads x,
    not the hidden layer; bias: b_out(k) is added.
    """

    weight: str
    q_hi: int
    q_lo: int = 0
    own: bool = False
    reduce: str = "learners"
    stacked: bool = False
    from_x: bool = False
    bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Loads of a product: rows of `a` through the permutation or not, and operands read by bulk copies.

    turned: the matrix of weights has a column for each output, not a row.
    """

    gather: bool
    a_desc: bool
    w_desc: bool
    turned: bool = False

    def block_of_weights(self, tile: Tile) -> tuple[int, int]:
        """Rows and columns of the block of weights that a step reads."""
        return (tile.k, tile.n) if self.turned else (tile.n, tile.k)


POINTERS = Loads(gather=False, a_desc=False, w_desc=False)


@lru_cache
def products_of(spec: KernelSpec) -> tuple[Product, ...]:
    """The launches of layer 2 that give y."""
    n = spec.learners
    if spec.form == "rows":
        return (Product(weight="w_in", q_hi=n, own=True, reduce="rows", from_x=True),)
    if spec.form == "cols":
        return (Product(weight="w_in", q_hi=n, own=True, reduce="cols", from_x=True),)
    if spec.second == "per_k":
        return (Product(weight="w_out", q_hi=n, own=True, stacked=True),)
    if spec.second == "shared":
        return (Product(weight="w_out", q_hi=n),)
    dense = spec.form == "linear"
    top = Product(weight="w_top", q_hi=n, q_lo=n, own=True, reduce="all" if dense else "learners", from_x=dense)
    return (top, Product(weight="w_out", q_hi=n - 1))


def layer1_bands(spec: KernelSpec) -> int:
    """The largest k whose tokens need the hidden layer; 0: none do."""
    if spec.second == "none":
        return 0
    return spec.learners - 1 if spec.form == "linear" and spec.second == "top" else spec.learners


@lru_cache
def loads_of(
    spec: KernelSpec, machine: Machine, product: Product | None, *, in_order: bool = False, turned: bool = False
) -> Loads:
    """Loads for the operands of a product of layer 2, or of layer 1 (None); in_order: x is given in sorted order.

    turned: weights have a column for each output.
    """
    from_x = product is None or product.from_x
    hidden = spec.learners * spec.width
    weight_row = (hidden if product is None else spec.d_out) if turned else spec.d_in if from_x else hidden
    bulk = machine.bulk_copies and on_tensor_cores(spec) and spec.form != "cols"
    permuted = in_order or permutes_rows(spec, machine)
    row = spec.d_in if from_x else spec.hidden_row
    return Loads(
        gather=from_x and not permuted,
        a_desc=bulk and (permuted or not from_x) and is_aligned(row, spec),
        w_desc=bulk and is_aligned(weight_row, spec),
        turned=turned,
    )


def permutes_rows(spec: KernelSpec, machine: Machine) -> bool:
    """True if x is first copied in sorted order."""
    plain = on_tensor_cores(spec) and spec.form != "cols" and is_aligned(spec.d_in, spec)
    return machine.bulk_copies and not machine.fenced and plain


def on_tensor_cores(spec: KernelSpec) -> bool:
    """True if products run on tensor cores: fp32 that may not be rounded does not, and loads through pointers."""
    return spec.dtype != "fp32" or spec.tf32


def is_aligned(columns: int, spec: KernelSpec) -> bool:
    """True if bulk copies may begin at every row of a matrix of so many columns."""
    return columns * spec.itemsize % BULK_COPY_BYTES == 0


@lru_cache
def layer1_constants(spec: KernelSpec, tile: Tile, loads: Loads, *, interpret: bool) -> dict[str, Any]:
    """Constants of `layer1_kernel`."""
    return {
        "N": spec.learners,
        "H": spec.width,
        "ROW": spec.hidden_row,
        "Q_HI": layer1_bands(spec),
        "ACT": spec.act,
        "GATED": spec.form == "gated",
        "BIAS": spec.bias_in,
        "GATHER": loads.gather,
        "X_DESC": loads.a_desc,
        "W_DESC": loads.w_desc,
        "TURNED": loads.turned,
        "EVEN": spec.d_in % tile.k == 0,
        "SHORT": spec.dtype == "bf16",
        **tile_constants(spec, tile, interpret),
        # sums that are stored as they are would have the products of one loop over all tiles wait for each other
        "FLAT": tile.flat and (spec.bias_in or spec.act != "identity"),
    }


@lru_cache
def layer2_constants(
    spec: KernelSpec, tile: Tile, loads: Loads, product: Product, *, interpret: bool
) -> dict[str, Any]:
    """Constants of `layer2_kernel`."""
    return {
        "N": spec.learners,
        "H": spec.width,
        "HEAD": spec.head,
        "D_OUT": spec.d_out,
        "Q_HI": product.q_hi,
        "Q_LO": product.q_lo,
        "OWN": product.own,
        "REDUCE": product.reduce,
        "STACKED": product.stacked,
        "RESIDUAL": spec.residual,
        "GATHER": loads.gather,
        "A_DESC": loads.a_desc,
        "W_DESC": loads.w_desc,
        "TURNED": loads.turned,
        "EVEN": (spec.width if product.reduce in ("learners", "cols") else spec.d_in) % tile.k == 0,
        **tile_constants(spec, tile, interpret),
        "FLAT": tile.flat and not product.own,  # whose tiles of two k take registers of their own
    }


def constants_for(function: Any, constants: dict[str, Any], tile: Tile) -> dict[str, Any]:
    """Constants of a kernel that runs in another's place, of whose constants it has some, and slots."""
    given = constants | {"SLOTS": tile.stages}
    return {name: given[name] for name in function.arg_names if name in given}


@lru_cache
def few1_constants(spec: KernelSpec, tile: Tile, *, interpret: bool) -> dict[str, Any]:
    """Constants of `few1_kernel`."""
    constants = layer1_constants(spec, tile, POINTERS, interpret=interpret)
    return {name: value for name, value in constants.items() if name not in _SORTED_ONLY}


@lru_cache
def few2_constants(spec: KernelSpec, tile: Tile, splits: int, *, interpret: bool) -> dict[str, Any]:
    """Constants of `few2_kernel`."""
    return {
        "N": spec.learners,
        "H": spec.width,
        "ROW": spec.hidden_row,
        "D_OUT": spec.d_out,
        "SECOND": spec.second,
        "FROM_X": spec.form == "linear",
        "RESIDUAL": spec.residual and splits == 1,
        "SPLITS": splits,
        "EVEN": spec.width % tile.k == 0,
        **{name: value for name, value in tile_constants(spec, tile, interpret).items() if name not in _SORTED_ONLY},
    }


@lru_cache
def few_sum_constants(spec: KernelSpec, splits: int) -> dict[str, Any]:
    """Constants of `few_sum_kernel`."""
    return {
        "N": spec.learners,
        "D_OUT": spec.d_out,
        "RESIDUAL": spec.residual,
        "SPLITS": splits,
        "BN": _SUMMED,
    }


def tile_constants(spec: KernelSpec, tile: Tile, interpret: bool) -> dict[str, Any]:
    """Constants of every kernel that works on tiles."""
    precision = "tf32" if spec.tf32 else "ieee"
    return {
        "PRECISION": precision,
        "INTERPRET": interpret,
        "BM": tile.m,
        "BN": tile.n,
        "BK": tile.k,
        "GROUP": ROW_TILES,
        "FLAT": tile.flat,
    }


@lru_cache
def build_options(spec: KernelSpec, tile: Tile, loads: Loads, machine: Machine) -> dict[str, int]:
    """Warps and pipeline stages; without the proxy fence, pointer operands must not be pipelined (see Machine)."""
    if tile.turns:
        return kernel_options(warps=tile.warps)
    by_pointer = loads.gather or not (loads.a_desc and loads.w_desc)
    by_wgmma = machine.bulk_copies and on_tensor_cores(spec) and tile.m >= _WGMMA_ROWS
    unsafe = by_wgmma and by_pointer and not machine.fenced
    return kernel_options(warps=tile.warps, stages=1 if unsafe else tile.stages)


def few_options(tile: Tile) -> dict[str, int]:
    """Warps and pipeline stages of kernels for few tokens, whose products are none of wgmma's."""
    return kernel_options(warps=tile.warps, stages=tile.stages)


def few_sum_options() -> dict[str, int]:
    """Warps of `few_sum_kernel`: 16 bytes of each part for every thread."""
    return kernel_options(warps=_SUMMED // 128)
