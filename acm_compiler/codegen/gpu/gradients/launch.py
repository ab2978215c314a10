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
    POINTERS,
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
_ROWS, _COLUMNS = 8, 256  # of a block of branches


def products_spec(spec: KernelSpec, *, d_in: int, bias: bool = False, residual: bool = False) -> KernelSpec:
    """The backward's products as layers without an activation: from d_in to hidden values, from these to x."""
    return replace(
        spec, form="mlp", act="identity", d_in=d_in, d_out=spec.d_in, bias_in=bias, residual=residual, second="shared"
    )


def of_tokens(spec: KernelSpec) -> Product:
    """The product that gives gradients of tokens, a second layer without biases."""
    return Product(weight="w_out", q_hi=spec.learners, bias=False)


def product_tiles(spec: KernelSpec, machine: Machine, tokens: int) -> Tiles:
    """Tiles of the products that are layers: those of a forward of as many tokens."""
    bucket = max(bucket_of(tokens), _LEAST_BUCKET)
    return choose_tiles(products_spec(spec, d_in=spec.d_in), machine.arch, 1 << bucket, machine.processors)


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
        "ROW": spec.hidden_row,
        "ACT": spec.act,
        "EVERY": every,
        "SHORT": spec.dtype == "bf16",
        "INTERPRET": interpret,
        "BM": _ROWS,
        "BN": min(_COLUMNS, max(16, triton.next_power_of_2(spec.width))),
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
    """One backward on a machine: weights in one piece, the order of tokens, and x and dy in that order.

    whole: the same order as if every token ran every learner, where all are to be computed, else the order.
    """

    spec: KernelSpec
    weights: Weights
    machine: Machine
    tiles: Tiles
    order: Order
    whole: Order
    x: Tensor
    dy: Tensor

    def first(self, rows: Tensor, w: Tensor, b_NH: Tensor | None) -> Tensor:
        """Products [T, ROW] of sorted rows with a matrix of a row for every hidden value, of what tokens run."""
        spec = products_spec(self.spec, d_in=rows.shape[1], bias=b_NH is not None)
        weights = replace(self.weights, w_in=w, b_in=b_NH, w_up=None, b_up=None)
        return Layer1(spec, weights, self.machine, self.tiles.layer1, in_order=True)(rows, self.whole)

    def hidden(self, *, every: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """h, da and dup [T, ROW], and, where every learner counts, the sums of h dh over each [T, N]; sorted."""
        spec, w, tokens = self.spec, self.weights, self.x.shape[0]
        assert w.w_out is not None
        a = self.first(self.x, w.w_in, w.b_in)
        up = None if w.w_up is None else self.first(self.x, w.w_up, w.b_up)
        dh = self.first(self.dy, w.w_out.reshape(spec.d_out, -1).T.contiguous(), None)
        reach = self.x.new_empty(tokens, spec.learners, dtype=torch.float32) if every else None
        if every or up is not None or spec.act != "identity":
            constants = branches_constants(spec, every=every, interpret=INTERPRETED)
            programs = blocks_in(tokens, constants["BM"]) * spec.learners
            start = Launcher(branches_kernel, constants, branches_options())
            start(programs, a, up, dh, reach, self.order.counts, tokens)
        return a, dh, up, reach

    def tokens(self, da: Tensor, dup: Tensor | None) -> Tensor:
        """dx [T, D] in token order."""
        spec, w, tile = self.spec, self.weights, self.tiles.layer2
        dx, shape = da.new_empty(da.shape[0], spec.d_in), (spec.d_in, spec.learners, spec.width)
        for left, matrix in ((da, w.w_in), (dup, w.w_up)):
            if left is None or matrix is None:
                continue
            sums = None if left is da else dx  # each element is read where it is written
            weights = replace(w, w_out=matrix.reshape(-1, spec.d_in).T.contiguous().view(shape))
            of_layer = products_spec(spec, d_in=spec.d_in, residual=sums is not None)
            layer2 = Layer2(of_layer, weights, self.machine, tile, of_tokens(spec), misplaced=False)
            layer2(dx, left, sums, self.order)
        return dx

    def product(self, left: Tensor, right: Tensor, *, turned: bool) -> Tensor:
        """left.T right, [N * H, W] or turned, of the tokens that run each learner."""
        spec, m, wide = self.spec, self.spec.learners * self.spec.width, right.shape[1]
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
        """Sums of rows over the tokens of each k, [N + 1, columns] fp32; in_order: of their learners' values."""
        spec = self.spec
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
    pieces: Any = (None if tensor is None else tensor.contiguous() for tensor in weights.tensors)
    weights = Weights(*pieces, act=weights.act, form=weights.form)
    tiles = product_tiles(spec, machine, x_TD.shape[0])
    run = _Backward(spec, weights, machine, tiles, order, whole, x, dy)
    h, da, dup, reach_TN = run.hidden(every=every)
    found: dict[str, Tensor] = {}
    if "x" in wanted:
        found["x"] = run.tokens(da, dup)
    for name, left in (("in", da), ("up", dup)):
        if left is not None and f"w_{name}" in wanted:
            found[f"w_{name}"] = run.product(left, x, turned=False).view_as(weights.w_in)
        if left is not None and f"b_{name}" in wanted:
            of_bias = run.sums(left, columns=spec.learners * spec.width, in_order=True).sum(0)
            found[f"b_{name}"] = of_bias.to(x.dtype).view(weights.w_in.shape[:2])
    if "w_out" in wanted:
        assert weights.w_out is not None
        found["w_out"] = run.product(h, dy, turned=True).view_as(weights.w_out)
    if "b_out" in wanted:
        found["b_out"] = run.sums(by_rows(dy_TO), columns=spec.d_out, in_order=False).to(dy.dtype)
    if choice is not None:
        assert reach_TN is not None
        found["nu"] = _of_choice(reach_TN, dy_TO, weights, order, *choice)
    return found


def _of_choice(reach_TN: Tensor, dy: Tensor, weights: Weights, order: Order, dtype: torch.dtype, k_min: int) -> Tensor:
    """The gradient of nu [T, C]: of choosing k, what reaches its learners and its b_out."""
    of_learners = torch.empty_like(reach_TN).index_copy_(0, order.perm.long(), reach_TN).to(dtype)
    of_bias = dy.to(dtype) @ weights.b_out.to(dtype).T
    return (F.pad(of_learners.cumsum(1), (1, 0)) + of_bias)[:, k_min:]
