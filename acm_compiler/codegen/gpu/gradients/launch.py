"""The launches of a backward: hidden values and what reaches them, gradients of tokens, gradients of weights.

A plan holds what does not change between backwards of calls of one kind; weights are given to each call, so that all
ACMs of a shape have one, and weights that were cast for a call, as autocast does, need none of their own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.reference import Weights
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.calls.kept import ALIGNED, kind_of_k, kind_of_rows, rounding
from acm_compiler.codegen.gpu.dispatch import Order, Rows, Sort
from acm_compiler.codegen.gpu.gradients.kernels import branches_kernel, sums_kernel, total_kernel, weights_kernel
from acm_compiler.codegen.gpu.gradients.stages import (
    SUMS,
    branches_constants,
    branches_of,
    first_spec,
    of_tokens,
    parts_of,
    parts_of_sums,
    plain_options,
    product_tiles,
    second_spec,
    sums_constants,
    sums_options,
    total_constants,
    weights_constants,
    weights_loads,
    weights_tile,
)
from acm_compiler.codegen.gpu.products import Layer1, Layer2, by_rows
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of
from acm_compiler.codegen.gpu.stages import Machine, build_options
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, blocks_of, is_starting
from acm_compiler.codegen.gpu.tiles import bucket_of

_MOST = 256  # plans
_PLANS: dict[Hashable, BackwardPlan] = {}


class _Total:
    """The launch that adds up parts [PARTS, SIZE], fp32."""

    def __init__(self, parts: int, size: int) -> None:
        constants = total_constants(parts, size)
        self._programs = blocks_in(size, constants["BN"])
        self._start = Launcher(total_kernel, constants, plain_options())

    def __call__(self, parts: Tensor, total: Tensor) -> Tensor:
        """Their sum, written into `total`, of any shape."""
        self._start(self._programs, total, parts)
        return total


class _Products:
    """left.T right of sorted rows, [N * H, wide] or turned, of the tokens that run each learner."""

    def __init__(self, spec: KernelSpec, machine: Machine, wide: int, tokens: int, *, turned: bool) -> None:
        m, loads = spec.learners * spec.width, weights_loads(spec, machine, wide)
        tile = weights_tile(spec, loads)
        tiles = blocks_in(m, tile.m) * blocks_in(wide, tile.n)
        self._split = split = parts_of(tiles, machine.processors * tile.resident, tokens)
        self._programs, self._wide = tiles * split, wide
        self._shape = (wide, m) if turned else (m, wide)
        self._blocks = ((tile.k, tile.m), (tile.k, tile.n)) if loads.a_desc else None
        constants = weights_constants(spec, loads, split, turned=turned, interpret=INTERPRETED)
        self._start = Launcher(weights_kernel, constants, build_options(spec, tile, loads, machine))
        self._total = _Total(split, m * wide) if split > 1 else None

    def __call__(self, left: Tensor, right: Tensor, order: Order) -> Tensor:
        total = right.new_empty(self._shape)
        parts = total if self._total is None else right.new_empty(self._split, *self._shape, dtype=torch.float32)
        operands: Any = left, right
        if self._blocks is not None:
            operands = blocks_of(left, *self._blocks[0]), blocks_of(right, *self._blocks[1])
        self._start(self._programs, parts, *operands, order.counts, self._wide)
        return total if self._total is None else self._total(parts, total)


class _Sums:
    """Sums over tokens: of rows [T, columns] those of each k, [N + 1, columns].

    is_sorted: of rows in sorted order, with as many numbers for each learner, what the tokens run, [columns].
    """

    def __init__(self, spec: KernelSpec, machine: Machine, columns: int, *, is_sorted: bool) -> None:
        bands = spec.learners + 1
        tiles = bands * blocks_in(columns, SUMS.n)
        split = parts_of_sums(tiles, machine.processors * SUMS.resident)
        self._programs, self._columns, self._is_sorted = tiles * split, columns, is_sorted
        self._parts = split, bands, columns
        self._shape = (columns,) if is_sorted else (bands, columns)
        self._start = Launcher(sums_kernel, sums_constants(spec, split), sums_options())
        self._total = _Total(split * bands, columns) if is_sorted else _Total(split, bands * columns)

    def __call__(self, rows: Tensor, order: Order) -> Tensor:
        parts = rows.new_empty(self._parts, dtype=torch.float32)
        perm = None if self._is_sorted else order.perm
        self._start(self._programs, parts, rows, perm, order.counts, self._columns, rows.stride(0))
        return self._total(parts, rows.new_empty(self._shape))


class BackwardPlan:
    """Launches for backwards of calls of one kind, with as many tokens as its bucket has.

    For learners that share one second layer. every: the choice has a gradient, so that every learner is computed.
    """

    def __init__(self, spec: KernelSpec, machine: Machine, bucket: int, *, every: bool) -> None:
        first, second, columns = first_spec(spec), second_spec(spec), spec.learners * spec.width
        tokens = 1 << bucket
        tiles = product_tiles(spec, machine, tokens)
        self._every, self._branches = every, branches_of(spec)
        self._learners, self._d_in = spec.learners, spec.d_in
        self._sort = Sort(spec.learners, bucket)
        self._rows = tuple(Rows(width, in_order=True, norm=None) for width in (spec.d_in, spec.d_out))
        self._first = Layer1(first, machine, tiles.layer1, in_order=True)
        self._second = Layer1(second, machine, tiles.layer1, in_order=True, turned=True)
        self._activation: Launcher | None = None
        if every or spec.form != "linear":
            constants = branches_constants(spec, every=every, interpret=INTERPRETED)
            self._block = constants["BM"]
            self._activation = Launcher(branches_kernel, constants, plain_options())
        of_branches = zip((first, replace(first, residual=True)), self._branches, strict=False)
        self._tokens = [
            Layer2(layer, machine, tiles.layer2, of_tokens(layer, branch), turned=True) for layer, branch in of_branches
        ]
        self._of_first = _Products(first, machine, spec.d_in, tokens, turned=False)
        self._of_second = _Products(first, machine, spec.d_out, tokens, turned=True)
        self._of_b_in = _Sums(first, machine, columns, is_sorted=True)
        self._of_b_out = _Sums(first, machine, spec.d_out, is_sorted=False)

    def __call__(
        self, dy_TO: Tensor, x_TD: Tensor, k_T: Tensor, weights: Weights, wanted: set[str], order: Order | None
    ) -> tuple[dict[str, Tensor], Tensor | None, Order]:
        """Gradients by name; where the choice has one, sums of h dh over each learner, [T, N] in sorted order."""
        w, order = weights, self._sort(k_T) if order is None else order
        assert w.w_out is not None
        whole = Order(order.perm, torch.full_like(order.counts, x_TD.shape[0])) if self._every else order
        x, dy = (rows(given, whole) for rows, given in zip(self._rows, (x_TD, dy_TO), strict=True))
        layers = ((w.w_in, w.b_in), (w.w_up, w.b_up))
        of_first = [self._first(x, whole, self._first.operands(m, b)) for m, b in layers if m is not None]
        h = self._second(dy, whole, self._second.operands(w.w_out, None))
        reach_TN = None
        if self._activation is not None:
            reach_TN = self._activate(self._activation, of_first, h, order)
        else:  # h is the product itself, and what reaches it is dh
            of_first, h = [h], of_first[0]
        found: dict[str, Tensor] = {}
        if "x" in wanted:
            found["x"] = self._of_tokens(of_first, w, order)
        for branch, reached in zip(("in", "up"), of_first, strict=False):
            if f"w_{branch}" in wanted:
                found[f"w_{branch}"] = self._of_first(reached, x, order).view_as(w.w_in)
            if f"b_{branch}" in wanted and w.b_in is not None:
                found[f"b_{branch}"] = self._of_b_in(reached, order).view_as(w.b_in)
        if "w_out" in wanted:
            found["w_out"] = self._of_second(h, dy, order).view_as(w.w_out)
        if "b_out" in wanted:
            found["b_out"] = self._of_b_out(dy_TO, order)
        return found, reach_TN, order

    def _activate(self, start: Launcher, first: list[Tensor], dh: Tensor, order: Order) -> Tensor | None:
        """Make products what reaches them, and dh h; the sums of h dh over each learner, where every one counts."""
        tokens = dh.shape[0]
        reach = dh.new_empty(tokens, self._learners, dtype=torch.float32) if self._every else None
        up = first[1] if len(first) > 1 else None
        start(blocks_in(tokens, self._block) * self._learners, first[0], up, dh, reach, order.counts, tokens)
        return reach

    def _of_tokens(self, of_first: list[Tensor], weights: Weights, order: Order) -> Tensor:
        """dx [T, D] in token order, of one branch after the other."""
        dx = None
        for layer, reached in zip(self._tokens, of_first, strict=True):
            total = reached.new_empty(reached.shape[0], self._d_in)
            layer(total, reached, dx, order, layer.operands(weights))
            dx = total
        assert dx is not None
        return dx


def run_backward(
    dy_TO: Tensor,
    x_TD: Tensor,
    k_T: Tensor,
    weights: Weights,
    *,
    wanted: set[str],
    machine: Machine,
    choice: tuple[torch.dtype, int] | None = None,
    order: Order | None = None,
) -> dict[str, Tensor]:
    """Gradients by name, of x, of weights, of nu where a choice, its type and k_min, has one; T >= 1, no host sync.

    For learners that share one second layer. order: of k, where it is known.
    """
    x, dy, k, every = by_rows(x_TD), by_rows(dy_TO), k_T.contiguous(), choice is not None
    kind = _kind(dy, x, k, weights, machine, every=every) if is_starting() else None
    plan = _PLANS.get(kind)
    made = plan is None
    if plan is None:
        plan = BackwardPlan(spec_of(x, weights, None), machine, bucket_of(x.shape[0]), every=every)
    found, reach_TN, order = plan(dy, x, k, weights, wanted, order)
    if made and kind is not None:  # its kernels were built
        if len(_PLANS) >= _MOST:
            _PLANS.clear()
        _PLANS[kind] = plan
    if choice is not None and reach_TN is not None:
        found["nu"] = _of_choice(reach_TN, dy, weights, order, *choice)
    return found


def _kind(dy: Tensor, x: Tensor, k: Tensor, weights: Weights, machine: Machine, *, every: bool) -> Hashable:
    """The kind of a backward, on which its plan depends; None where weights lie apart, or where no bulk copy begins."""
    given = weights.w_in, weights.b_in, weights.w_up, weights.b_up, weights.w_out
    if any(w is not None and (w.data_ptr() & ALIGNED or not w.is_contiguous()) for w in given):
        return None
    shapes = weights.w_in.shape, dy.shape[1], weights.b_in is None, weights.form, weights.act
    return kind_of_rows(x), kind_of_rows(dy), kind_of_k(k, x.shape[0]), rounding(x.dtype), shapes, machine, every


def _of_choice(reach_TN: Tensor, dy: Tensor, weights: Weights, order: Order, dtype: torch.dtype, k_min: int) -> Tensor:
    """The gradient of nu [T, C]: of choosing k, what reaches its learners and its b_out."""
    of_learners = torch.empty_like(reach_TN).index_copy_(0, order.perm.long(), reach_TN).to(dtype)
    of_bias = dy.to(dtype) @ weights.b_out.to(dtype).T
    return (F.pad(of_learners.cumsum(1), (1, 0)) + of_bias)[:, k_min:]
