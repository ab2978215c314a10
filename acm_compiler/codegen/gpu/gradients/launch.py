"""The launches of a backward: hidden values and what reaches them, gradients of tokens, gradients of weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from acm_compiler.acm.reference import Weights
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.dispatch import Order, Rows, sort_by_k
from acm_compiler.codegen.gpu.gradients.kernels import branches_kernel, sums_kernel, weights_kernel
from acm_compiler.codegen.gpu.launch import Layer1, Layer2, by_rows
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of
from acm_compiler.codegen.gpu.stages import (
    Loads,
    Machine,
    Product,
    build_options,
    is_aligned,
    kernel_options,
)
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, blocks_of
from acm_compiler.codegen.gpu.tiles import Tile, Tiles, bucket_of, choose_tiles, tile_of

_MOST_PARTS = 16
_PART_TOKENS = 1024  # products of so many tokens take as long as writing and adding up their sums, once more
_LEAST_BUCKET = 7  # fewer tokens are sorted, too
_WEIGHTS = {
    "bulk": "128x128x64 w4 s3 r2",
    "16": "64x64x32 w4 s2 r3",
    "fp32": "32x32x32 w4 s2 r2",
}
_SUMS = tile_of("1x64x32 w4 s3 r8")
_ROWS, _ROW_BYTES = 8, 512  # of a block of branches


def first_spec(spec: KernelSpec) -> KernelSpec:
    """The first layer without an activation, and its transpose: branches of a learner are neighbours."""
    width = 2 * spec.width if spec.form == "gated" else spec.width
    return replace(
        spec, form="mlp", act="identity", width=width, d_out=spec.d_in, residual=False, norm=False, second="shared"
    )


def second_spec(spec: KernelSpec) -> KernelSpec:
    """The second layer's transpose, as a first layer without an activation."""
    return replace(first_spec(spec), d_in=spec.d_out, width=spec.width, bias_in=False)


def of_tokens(spec: KernelSpec) -> Product:
    """The product that gives gradients of tokens, a second layer without biases."""
    return Product(weight="w_out", q_hi=spec.learners, bias=False)


def product_tiles(spec: KernelSpec, machine: Machine, tokens: int) -> Tiles:
    """Tiles of the products that are layers: those of a forward of as many tokens."""
    bucket = max(bucket_of(tokens), _LEAST_BUCKET)
    return choose_tiles(first_spec(spec), machine.arch, 1 << bucket, machine.processors)


def weights_loads(spec: KernelSpec, machine: Machine, wide: int) -> Loads:
    """Loads of both operands of `weights`, whose rows are summed over: bulk copies for types of 16 bits."""
    bulk = machine.bulk_copies and spec.itemsize == 2 and is_aligned(wide, spec)
    return Loads(gather=False, a_desc=bulk, w_desc=bulk)


def weights_tile(spec: KernelSpec, loads: Loads) -> Tile:
    """The tile of `weights`; compiled for sm_80 and sm_90 without spills."""
    return tile_of(_WEIGHTS["bulk" if loads.a_desc else "fp32" if spec.dtype == "fp32" else "16"])


def weights_constants(spec: KernelSpec, loads: Loads, split: int, *, turned: bool, interpret: bool) -> dict[str, Any]:
    """Constants of `weights_kernel`."""
    tile = weights_tile(spec, loads)
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
        "FIRST_ROW": first_spec(spec).hidden_row,
        "ROW": spec.hidden_row,
        "ACT": spec.act,
        "GATED": spec.form == "gated",
        "EVERY": every,
        "SHORT": spec.dtype == "bf16",
        "INTERPRET": interpret,
        "BM": _ROWS,
        "BN": min(_ROW_BYTES // spec.itemsize, max(16, triton.next_power_of_2(spec.width))),
    }


def sums_constants(spec: KernelSpec, split: int) -> dict[str, Any]:
    """Constants of `sums_kernel`."""
    return {"N": spec.learners, "PER_K": spec.width, "SPLIT": split, "BN": _SUMS.n, "BK": _SUMS.k}


def branches_options() -> dict[str, int]:
    """Warps of `branches_kernel`."""
    return kernel_options(warps=4)


def sums_options() -> dict[str, int]:
    """Warps and stages of `sums_kernel`."""
    return kernel_options(warps=_SUMS.warps, stages=_SUMS.stages)


def parts_of(tiles: int, slots: int, tokens: int) -> int:
    """Programs that share the tokens of a tile of `weights`: what fills the last wave, less what it costs to add up."""

    def time(parts: int) -> float:
        waves = -(-tiles * parts // slots)
        return waves * slots / (tiles * parts) + (parts > 1) * parts * _PART_TOKENS / tokens

    return min(range(1, _MOST_PARTS + 1), key=time)


@dataclass(frozen=True, slots=True)
class _Backward:
    """One backward on a machine: its spec, the first layer's (of both branches), tiles, and the order of tokens.

    whole: the same order as if every token ran every learner, where all are to be computed, else the order.
    """

    spec: KernelSpec
    first: KernelSpec
    machine: Machine
    tiles: Tiles
    order: Order
    whole: Order

    def layer(self, spec: KernelSpec, rows: Tensor, weights: Weights) -> Tensor:
        """Products [T, ROW] of sorted rows with a matrix of a row for every value, of learners that tokens run."""
        return Layer1(spec, weights, self.machine, self.tiles.layer1, in_order=True)(rows, self.whole)

    def branches(self, first: Tensor, dh: Tensor, *, every: bool) -> Tensor | None:
        """Make first what reaches it, and dh h; the sums of h dh over each learner [T, N], where every one counts."""
        spec, tokens = self.spec, first.shape[0]
        reach = first.new_empty(tokens, spec.learners, dtype=torch.float32) if every else None
        constants = branches_constants(spec, every=every, interpret=INTERPRETED)
        programs = blocks_in(tokens, constants["BM"]) * spec.learners
        start = Launcher(branches_kernel, constants, branches_options())
        start(programs, first, dh, reach, self.order.counts, tokens)
        return reach

    def tokens(self, first: Tensor, weights: Weights) -> Tensor:
        """dx [T, D] in token order."""
        d_in = self.spec.d_in
        turned = weights.w_in.reshape(-1, d_in).T.contiguous().view(d_in, *weights.w_in.shape[:2])
        dx, layer = first.new_empty(first.shape[0], d_in), replace(weights, w_out=turned)
        product, tile = of_tokens(self.first), self.tiles.layer2
        Layer2(self.first, layer, self.machine, tile, product, misplaced=False)(dx, first, None, self.order)
        return dx

    def product(self, spec: KernelSpec, left: Tensor, right: Tensor, *, turned: bool) -> Tensor:
        """left.T right, [N * H, W] or turned, of the tokens that run each learner."""
        m, wide = spec.learners * spec.width, right.shape[1]
        loads = weights_loads(spec, self.machine, wide)
        tile = weights_tile(spec, loads)
        tiles = blocks_in(m, tile.m) * blocks_in(wide, tile.n)
        split = parts_of(tiles, self.machine.processors * tile.resident, right.shape[0])
        dtype = right.dtype if split == 1 else torch.float32
        parts = right.new_empty(split, *((wide, m) if turned else (m, wide)), dtype=dtype)
        operands: Any = left, right
        if loads.a_desc:
            operands = blocks_of(left, tile.k, tile.m), blocks_of(right, tile.k, tile.n)
        constants = weights_constants(spec, loads, split, turned=turned, interpret=INTERPRETED)
        start = Launcher(weights_kernel, constants, build_options(spec, tile, loads, self.machine))
        start(tiles * split, parts, *operands, self.order.counts, wide)
        return parts[0] if split == 1 else parts.sum(0).to(right.dtype)

    def sums(self, rows: Tensor, *, columns: int, in_order: bool) -> Tensor:
        """Sums of rows over the tokens of each k, [N + 1, columns] fp32; in_order: of their learners' products."""
        spec = self.first
        tiles = (spec.learners + 1) * blocks_in(columns, _SUMS.n)
        split = max(1, min(_MOST_PARTS, self.machine.processors * _SUMS.resident // tiles))
        parts = rows.new_empty(split, spec.learners + 1, columns, dtype=torch.float32)
        perm = None if in_order else self.order.perm
        start = Launcher(sums_kernel, sums_constants(spec, split), sums_options())
        start(tiles * split, parts, rows, perm, self.order.counts, columns, rows.stride(0))
        return parts.sum(0)


def run_backward(
    dy_TO: Tensor,
    x_TD: Tensor,
    k_T: Tensor,
    weights: Weights,
    *,
    wanted: set[str],
    machine: Machine,
    choice: tuple[torch.dtype, int] | None = None,
) -> dict[str, Tensor]:
    """Gradients by name, of x, of weights, of nu where a choice, its type and k_min, has one; T >= 1, no host sync.

    For learners that share one second layer.
    """
    spec, every = spec_of(x_TD, weights, None), choice is not None
    order = sort_by_k(k_T.contiguous(), spec.learners)
    whole = Order(order.perm, torch.full_like(order.counts, x_TD.shape[0])) if every else order
    x, dy = (Rows(rows.shape[1], in_order=True, norm=None)(by_rows(rows), whole) for rows in (x_TD, dy_TO))
    first, layer = first_spec(spec), _both_branches(weights)
    run = _Backward(spec, first, machine, product_tiles(spec, machine, x_TD.shape[0]), order, whole)
    assert weights.w_out is not None
    second = replace(layer, w_in=weights.w_out.reshape(spec.d_out, -1).T.contiguous(), b_in=None)
    of_first, h = run.layer(first, x, layer), run.layer(second_spec(spec), dy, second)
    reach_TN = None
    if every or spec.form != "linear":
        reach_TN = run.branches(of_first, h, every=every)
    else:  # h is the product itself, and what reaches it is dh
        of_first, h = h, of_first
    found: dict[str, Tensor] = {}
    if "x" in wanted:
        found["x"] = run.tokens(of_first, layer)
    if wanted & {"w_in", "w_up"}:
        of_weights = run.product(first, of_first, x, turned=False).view_as(layer.w_in)
        found |= zip(("w_in", "w_up"), of_weights.split(spec.width, 1), strict=False)
    if wanted & {"b_in", "b_up"} and layer.b_in is not None:
        of_biases = run.sums(of_first, columns=layer.b_in.numel(), in_order=True).sum(0).to(x.dtype).view_as(layer.b_in)
        found |= zip(("b_in", "b_up"), of_biases.split(spec.width, 1), strict=False)
    if "w_out" in wanted:
        found["w_out"] = run.product(spec, h, dy, turned=True).view_as(weights.w_out)
    if "b_out" in wanted:
        found["b_out"] = run.sums(by_rows(dy_TO), columns=spec.d_out, in_order=False).to(dy.dtype)
    if choice is not None:
        assert reach_TN is not None
        found["nu"] = _of_choice(reach_TN, dy_TO, weights, order, *choice)
    return {name: grad for name, grad in found.items() if name in wanted}


def _both_branches(weights: Weights) -> Weights:
    """The first layer with the rows of both branches of a learner, one below the other, if it is gated."""
    w_in, b_in = weights.w_in, weights.b_in
    if weights.w_up is not None:
        w_in = torch.cat([w_in, weights.w_up], 1)
        b_in = None if b_in is None or weights.b_up is None else torch.cat([b_in, weights.b_up], 1)
    return replace(weights, w_in=w_in.contiguous(), b_in=b_in, w_up=None, b_up=None)


def _of_choice(reach_TN: Tensor, dy: Tensor, weights: Weights, order: Order, dtype: torch.dtype, k_min: int) -> Tensor:
    """The gradient of nu [T, C]: of choosing k, what reaches its learners and its b_out."""
    of_learners = torch.empty_like(reach_TN).index_copy_(0, order.perm.long(), reach_TN).to(dtype)
    of_bias = dy.to(dtype) @ weights.b_out.to(dtype).T
    return (F.pad(of_learners.cumsum(1), (1, 0)) + of_bias)[:, k_min:]
