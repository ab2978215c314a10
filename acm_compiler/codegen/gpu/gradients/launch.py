"""The launches of a backward: hidden values and what reaches them, gradients of tokens, gradients of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.reference import Weights
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.dispatch import Order, sort_by_k
from acm_compiler.codegen.gpu.gradients.kernels import (
    bias_kernel,
    hidden_kernel,
    tokens_kernel,
    weights_kernel,
)
from acm_compiler.codegen.gpu.launch import by_rows
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of
from acm_compiler.codegen.gpu.stages import POINTERS, Machine, build_options
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, fewer
from acm_compiler.codegen.gpu.tiles import Tile, tile_of

_MOST_PARTS = 16
_TILES = {
    "16": {
        "hidden": "64x64x32 w4 s3 r2",
        "hidden gated": "64x64x32 w8 s3 r1",
        "tokens": "64x64x32 w4 s3 r3",
        "weights": "64x64x32 w4 s2 r3",
        "bias": "1x64x32 w4 s3 r8",
    },
    "fp32": {
        "hidden": "32x32x32 w4 s2 r2",
        "hidden linear": "32x32x32 w4 s3 r2",
        "tokens": "32x64x32 w4 s2 r2",
        "weights": "32x32x32 w4 s2 r2",
        "bias": "1x64x32 w4 s3 r8",
    },
}


def gradient_tile(spec: KernelSpec, kernel: str) -> Tile:
    """The tile of a kernel: hidden, tokens, weights or bias; compiled for sm_80 and sm_90 without spills, not timed.

    What `hidden` writes is read by parts of its blocks: `tokens` has no more rows, and its steps and the rows of
    `weights` divide the columns.
    """
    row = _TILES["fp32" if spec.dtype == "fp32" else "16"]
    return tile_of(row.get(f"{kernel} {spec.form}", row[kernel]))


def constants_of(spec: KernelSpec, kernel: str, *, interpret: bool, **own: Any) -> dict[str, Any]:
    """Constants of a kernel; own: EVERY of hidden, BIAS of weights, SPLIT of these and bias."""
    tile = gradient_tile(spec, kernel)
    if kernel == "bias":
        return {"N": spec.learners, "BN": tile.n, "BK": tile.k} | own
    shape = {"N": spec.learners, "H": spec.width, "ROW": spec.hidden_row}
    blocks = {"BM": tile.m, "BN": tile.n, "BK": tile.k}
    rest = {"PRECISION": "tf32" if spec.tf32 else "ieee", "INTERPRET": interpret}
    if kernel == "weights":
        return shape | rest | blocks | own
    gated = {"GATED": spec.form == "gated", "GROUP": 8}
    if kernel == "tokens":
        return shape | {"WIDTH": spec.d_in} | gated | rest | blocks
    more = {"D_OUT": spec.d_out, "ACT": spec.act, "BIAS": spec.bias_in, "SHORT": spec.dtype == "bf16"}
    return shape | more | gated | rest | blocks | own


@dataclass(frozen=True, slots=True)
class _Backward:
    """One backward: its order and operands, on a machine."""

    spec: KernelSpec
    weights: Weights
    machine: Machine
    order: Order
    x: Tensor
    dy: Tensor

    def start(self, kernel: str, function: Any, programs: int, *args: Any, **own: Any) -> None:
        """Start a kernel with its constants."""
        options = build_options(self.spec, gradient_tile(self.spec, kernel), POINTERS, self.machine)
        Launcher(function, constants_of(self.spec, kernel, interpret=INTERPRETED, **own), options)(programs, *args)

    def hidden(self, *, every: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """h, da and dup [T, ROW], and the sums of h dh over each learner [T, N]; in sorted order."""
        spec, w, tokens, tile = self.spec, self.weights, self.x.shape[0], gradient_tile(self.spec, "hidden")
        wide = blocks_in(spec.learners * spec.width, tile.n)
        h, da = (self.x.new_empty(tokens, spec.hidden_row) for _ in range(2))
        dup = None if w.w_up is None else torch.empty_like(da)
        reach = self.x.new_zeros(tokens, wide, spec.learners, dtype=torch.float32) if every else None
        programs = fewer(self.machine.processors * tile.resident, blocks_in(tokens, tile.m) * wide)
        operands = w.w_in.contiguous(), w.b_in, w.w_up, w.b_up, w.w_out
        given = *operands, *self.order, tokens, spec.d_in, self.x.stride(0), self.dy.stride(0)
        self.start("hidden", hidden_kernel, programs, h, da, dup, reach, self.x, self.dy, *given, EVERY=every)
        return h, da, dup, None if reach is None else reach.sum(1)

    def tokens(self, da: Tensor, dup: Tensor | None) -> Tensor:
        """dx [T, D] in token order."""
        spec, w, tile = self.spec, self.weights, gradient_tile(self.spec, "tokens")
        dx = self.x.new_empty(self.x.shape[0], spec.d_in)
        tiles = (blocks_in(dx.shape[0], tile.m) + 1) * blocks_in(spec.d_in, tile.n)
        programs = fewer(self.machine.processors * tile.resident, tiles)
        given = dx, da, dup, w.w_in, w.w_up, *self.order, dx.shape[0], spec.d_in
        self.start("tokens", tokens_kernel, programs, *given)
        return dx

    def product(self, left: Tensor, right: Tensor, *, bias: bool, turned: bool) -> tuple[Tensor, Tensor | None]:
        """left.T right, [N * H, W] or turned, and the sums of left, of the tokens that run each learner."""
        spec, tile = self.spec, gradient_tile(self.spec, "weights")
        m, wide = spec.learners * spec.width, right.shape[1]
        tiles = blocks_in(m, tile.m) * blocks_in(wide, tile.n)
        split = self.parts(tiles, tile)
        parts = right.new_empty(split, *((wide, m) if turned else (m, wide)), dtype=torch.float32)
        sums = right.new_empty(split, m, dtype=torch.float32) if bias else None
        strides = (1, m) if turned else (wide, 1)
        given = parts, sums, left, right, *self.order, wide, right.stride(0), *strides
        self.start("weights", weights_kernel, tiles * split, *given, BIAS=bias, SPLIT=split)
        return parts.sum(0).to(right.dtype), None if sums is None else sums.sum(0).to(right.dtype)

    def bias(self) -> Tensor:
        """Sums of dy over the tokens of each k, [N + 1, O]."""
        spec, tile = self.spec, gradient_tile(self.spec, "bias")
        tiles = (spec.learners + 1) * blocks_in(spec.d_out, tile.n)
        split = self.parts(tiles, tile)
        parts = self.dy.new_empty(split, spec.learners + 1, spec.d_out, dtype=torch.float32)
        given = parts, self.dy, *self.order, spec.d_out, self.dy.stride(0)
        self.start("bias", bias_kernel, tiles * split, *given, SPLIT=split)
        return parts.sum(0).to(self.dy.dtype)

    def parts(self, tiles: int, tile: Tile) -> int:
        """Number of programs that share the tokens of a tile."""
        return max(1, min(_MOST_PARTS, self.machine.processors * tile.resident // tiles))


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
    spec = spec_of(x_TD, weights, None)
    order = sort_by_k(k_T.contiguous(), spec.learners)
    x, dy = by_rows(x_TD), by_rows(dy_TO)
    whole: Any = (None if tensor is None else tensor.contiguous() for tensor in weights.tensors)
    run = _Backward(spec, Weights(*whole, act=weights.act, form=weights.form), machine, order, x, dy)
    h, da, dup, reach_TN = run.hidden(every=choice is not None)
    found: dict[str, Tensor | None] = {}
    if "x" in wanted:
        found["x"] = run.tokens(da, dup)
    for name, left in (("in", da), ("up", dup)):
        if left is not None and wanted & {f"w_{name}", f"b_{name}"}:
            of_weight, of_bias = run.product(left, x, bias=f"b_{name}" in wanted, turned=False)
            found[f"w_{name}"] = of_weight.view_as(weights.w_in)
            found[f"b_{name}"] = None if of_bias is None else of_bias.view(weights.w_in.shape[:2])
    if "w_out" in wanted:
        assert weights.w_out is not None
        found["w_out"] = run.product(h, dy, bias=False, turned=True)[0].view_as(weights.w_out)
    if "b_out" in wanted:
        found["b_out"] = run.bias()
    if choice is not None:
        assert reach_TN is not None
        found["nu"] = _of_choice(reach_TN, dy, weights, order, *choice)
    return {name: grad for name, grad in found.items() if grad is not None and name in wanted}


def _of_choice(reach_TN: Tensor, dy: Tensor, weights: Weights, order: Order, dtype: torch.dtype, k_min: int) -> Tensor:
    """The gradient of nu [T, C]: of choosing k, what reaches its learners and its b_out."""
    of_learners = torch.empty_like(reach_TN).index_copy_(0, order.perm.long(), reach_TN).to(dtype)
    of_bias = dy.to(dtype) @ weights.b_out.to(dtype).T
    return (F.pad(of_learners.cumsum(1), (1, 0)) + of_bias)[:, k_min:]
