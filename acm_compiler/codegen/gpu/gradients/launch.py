"""The launches of a backward: hidden values and what reaches them, gradients of tokens, gradients of weights.

A plan holds what does not change between backwards of calls of one kind; weights are given to each call, so that all
ACMs of a shape have one, and weights that were cast for a call, as autocast does, need none of their own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.calls.kept import ALIGNED, kind_of_k, kind_of_rows, rounding
from acm_compiler.codegen.gpu.dispatch import Order, Rows, Sort
from acm_compiler.codegen.gpu.gradients.kernels import branches_kernel, hidden_kernel
from acm_compiler.codegen.gpu.gradients.reductions import Biases, Products, Sums
from acm_compiler.codegen.gpu.gradients.stages import (
    branches_constants,
    branches_of,
    first_spec,
    hidden_constants,
    hidden_loads,
    hidden_options,
    is_fused,
    of_tokens,
    plain_options,
    product_tiles,
    reached_constants,
    reaches_in_turn,
    second_spec,
)
from acm_compiler.codegen.gpu.products import AsOperand, Grid, Kept, Layer1, Layer2, by_rows, flat
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of
from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, blocks_of, is_starting
from acm_compiler.codegen.gpu.tiles import Tile, bucket_of

_MOST = 256  # plans
_PLANS: dict[Hashable, BackwardPlan] = {}


class Hidden(NamedTuple):
    """Hidden values of a first layer, in sorted order, and what reaches its branches' products, [T, hidden_row].

    of_bias: the gradient of its one branch's biases, where the launch gave it, too. of_learners [T, N]: sums of h dh
    over each learner, where a choice has a gradient.
    """

    h: Tensor
    reached: list[Tensor]
    of_bias: Tensor | None = None
    of_learners: Tensor | None = None


class _Fused:
    """The launch that gives a plain MLP's hidden values and what reaches them, and one for gradients of its biases."""

    def __init__(self, spec: KernelSpec, machine: Machine, tile: Tile) -> None:
        loads = of_x, of_dy = hidden_loads(spec, machine)
        self._row, self._columns, self._sizes = spec.hidden_row, spec.learners * spec.width, (spec.d_in, spec.d_out)
        self._w_in, self._w_out = AsOperand(tile, of_x), AsOperand(tile, of_dy)
        self._blocks = tuple((tile.m, tile.k) if load.a_desc else None for load in loads)
        self._grid, self._tile_rows = Grid(machine, tile, self._columns), tile.m
        constants = hidden_constants(spec, tile, loads, interpret=INTERPRETED)
        self._start = Launcher(hidden_kernel, constants, hidden_options(spec, tile, loads, machine))
        self._of_bias = Biases(spec, tile.m) if spec.bias_in else None

    def __call__(
        self, x: Tensor, dy: Tensor, weights: Weights, whole: Order, order: Order, kept: Kept | None
    ) -> Hidden:
        assert weights.w_out is not None
        tokens, sums = x.shape[0], None
        h, reached = x.new_empty(tokens, self._row), x.new_empty(tokens, self._row)
        if self._of_bias is not None:
            sums = x.new_empty(blocks_in(tokens, self._tile_rows), self._columns, dtype=torch.float32)
        x_rows, dy_rows = (
            rows if block is None else blocks_of(rows, *block)
            for rows, block in zip((x, dy), self._blocks, strict=True)
        )
        w_in = self._w_in(weights.w_in.contiguous().view(-1, self._sizes[0]))
        w_out = self._w_out(weights.w_out.contiguous().view(-1, self._columns))
        operands = x_rows, w_in, flat(weights.b_in), dy_rows, w_out
        self._start(self._grid(tokens), h, reached, sums, *operands, order.counts, tokens, *self._sizes)
        of_bias = None if self._of_bias is None or sums is None else self._of_bias(sums, order, x.dtype)
        return Hidden(h, [reached], of_bias)


class _Reached:
    """The launch that gives what reaches a plain MLP's kept products, and one for gradients of its biases."""

    def __init__(self, spec: KernelSpec, machine: Machine, tile: Tile) -> None:
        from acm_compiler.codegen.gpu.turns.gradients import reached_kernel

        _, loads = hidden_loads(spec, machine)
        self._columns, self._d_out = spec.learners * spec.width, spec.d_out
        self._w_out, self._block = AsOperand(tile, loads), (tile.m, tile.k)
        self._grid, self._tile_rows = Grid(machine, tile, self._columns), tile.m
        self._start = Launcher(reached_kernel, reached_constants(spec, tile), plain_options())
        self._of_bias = Biases(spec, tile.m) if spec.bias_in else None

    def __call__(
        self, x: Tensor, dy: Tensor, weights: Weights, whole: Order, order: Order, kept: Kept | None
    ) -> Hidden:
        assert weights.w_out is not None and kept is not None
        tokens, sums = dy.shape[0], None
        reached = torch.empty_like(kept.first)
        if self._of_bias is not None:
            sums = dy.new_empty(blocks_in(tokens, self._tile_rows), self._columns, dtype=torch.float32)
        operands = (
            blocks_of(dy, *self._block, turns=True),
            self._w_out(weights.w_out.contiguous().view(-1, self._columns)),
        )
        self._start(self._grid(tokens), reached, sums, kept.first, *operands, order.counts, tokens, self._d_out)
        of_bias = None if self._of_bias is None or sums is None else self._of_bias(sums, order, dy.dtype)
        return Hidden(kept.h, [reached], of_bias)


class _Branches:
    """Launches for other first layers: products for branches, unless kept, one for h, then what is made of them."""

    def __init__(self, spec: KernelSpec, machine: Machine, tile: Tile, *, every: bool) -> None:
        self._every, self._learners = every, spec.learners
        self._first = Layer1(first_spec(spec), machine, tile, in_order=True)
        self._second = Layer1(second_spec(spec), machine, tile, in_order=True, turned=True)
        self._activation: Launcher | None = None
        if every or spec.form != "linear":
            constants = branches_constants(spec, every=every, interpret=INTERPRETED)
            self._block = constants["BM"]
            self._activation = Launcher(branches_kernel, constants, plain_options())

    def __call__(self, x: Tensor, dy: Tensor, w: Weights, whole: Order, order: Order, kept: Kept | None) -> Hidden:
        assert w.w_out is not None
        dh = self._second(dy, whole, self._second.operands(w.w_out, None))
        if kept is not None:
            return self._of_kept(kept, dh, order)
        layers = ((w.w_in, w.b_in), (w.w_up, w.b_up))
        first = [self._first(x, whole, self._first.operands(m, b)) for m, b in layers if m is not None]
        if self._activation is None:  # h is the product itself, and what reaches it is dh
            return Hidden(first[0], [dh])
        tokens = dh.shape[0]
        reach = dh.new_empty(tokens, self._learners, dtype=torch.float32) if self._every else None
        up = first[1] if len(first) > 1 else None
        in_place = first[0], up, dh, None, None, None
        self._activation(self._programs(tokens), *in_place, reach, order.counts, tokens)
        return Hidden(dh, first, of_learners=reach)

    def _of_kept(self, kept: Kept, dh: Tensor, order: Order) -> Hidden:
        """The same of products that stay as they are."""
        if self._activation is None:
            return Hidden(kept.h, [dh])
        tokens, of_up = dh.shape[0], None if kept.up is None else torch.zeros_like(dh)  # as dh has zeros behind k
        outputs = dh, of_up, None
        self._activation(self._programs(tokens), *outputs, kept.first, kept.up, dh, None, order.counts, tokens)
        return Hidden(kept.h, [dh] if of_up is None else [dh, of_up])

    def _programs(self, tokens: int) -> int:
        return blocks_in(tokens, self._block) * self._learners


class BackwardPlan:
    """Launches for backwards of calls of one kind, with as many tokens as its bucket has.

    For learners that share one second layer. every: the choice has a gradient, so that every learner is computed.
    keeps: the forward kept its first layer.
    """

    def __init__(self, spec: KernelSpec, machine: Machine, bucket: int, *, every: bool, keeps: bool = False) -> None:
        first, tokens = first_spec(spec), 1 << bucket
        apart = every or keeps
        tiles = product_tiles(spec, machine, tokens, apart=apart)
        self._every, self._branches = every, branches_of(spec)
        self._d_in = spec.d_in
        self._sort = Sort(spec.learners, bucket)
        self._rows = Rows(spec.d_in), Rows(spec.d_out)
        self._hidden: _Fused | _Reached | _Branches
        if is_fused(spec, apart=apart):
            self._hidden = _Fused(spec, machine, tiles.layer1)
        elif keeps and reaches_in_turn(spec, tiles.layer1):
            self._hidden = _Reached(spec, machine, tiles.layer1)
        else:
            self._hidden = _Branches(spec, machine, tiles.layer1, every=every)
        of_branches = zip((first, replace(first, residual=True)), self._branches, strict=False)
        self._tokens = [
            Layer2(layer, machine, tiles.layer2, of_tokens(layer, branch), turned=True) for layer, branch in of_branches
        ]
        turns = tiles.layer2.turns
        self._of_first = Products(first, machine, spec.d_in, tokens, turned=False, turns=turns)
        self._of_second = Products(first, machine, spec.d_out, tokens, turned=True, turns=turns)
        self._of_b_in = Sums(first, machine, spec.learners * spec.width, is_sorted=True)
        self._of_b_out = Sums(first, machine, spec.d_out, is_sorted=False)

    def __call__(
        self,
        dy_TO: Tensor,
        x_TD: Tensor,
        k_T: Tensor,
        weights: Weights,
        wanted: set[str],
        order: Order | None,
        kept: Kept | None = None,
    ) -> tuple[dict[str, Tensor], Tensor | None, Order]:
        """Gradients by name; where the choice has one, sums of h dh over each learner, [T, N] in sorted order."""
        w, order = weights, self._sort(k_T) if order is None else order
        assert w.w_out is not None
        whole = Order(order.perm, torch.full_like(order.counts, x_TD.shape[0])) if self._every else order
        x, dy = (rows(given, whole) for rows, given in zip(self._rows, (x_TD, dy_TO), strict=True))
        h, reached, of_bias, of_learners = self._hidden(x, dy, w, whole, order, kept)
        found: dict[str, Tensor] = {}
        if "x" in wanted:
            found["x"] = self._of_tokens(reached, w, order)
        for branch, of_branch in zip(("in", "up"), reached, strict=False):
            if f"w_{branch}" in wanted:
                found[f"w_{branch}"] = self._of_first(of_branch, x, order).view_as(w.w_in)
            if f"b_{branch}" in wanted and w.b_in is not None:
                found[f"b_{branch}"] = (self._of_b_in(of_branch, order) if of_bias is None else of_bias).view_as(w.b_in)
        if "w_out" in wanted:
            found["w_out"] = self._of_second(h, dy, order).view_as(w.w_out)
        if "b_out" in wanted:
            found["b_out"] = self._of_b_out(dy_TO, order)
        return found, of_learners, order

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
    kept: Kept | None = None,
) -> dict[str, Tensor]:
    """Gradients by name, of x, of weights, of nu where a choice, its type and k_min, has one; T >= 1, no host sync.

    For learners that share one second layer. order: of k, where it is known; kept: by a forward in that order, without
    a choice's gradient.
    """
    x, dy, k, every = by_rows(x_TD), by_rows(dy_TO), k_T.contiguous(), choice is not None
    kind = _kind(dy, x, k, weights, machine, every, kept is not None) if is_starting() else None
    plan = _PLANS.get(kind)
    made = plan is None
    if plan is None:
        plan = BackwardPlan(
            spec_of(x, weights, None), machine, bucket_of(x.shape[0]), every=every, keeps=kept is not None
        )
    found, of_learners, order = plan(dy, x, k, weights, wanted, order, kept)
    if made and kind is not None:  # its kernels were built
        if len(_PLANS) >= _MOST:
            _PLANS.clear()
        _PLANS[kind] = plan
    if choice is not None and of_learners is not None:
        found["nu"] = _of_choice(of_learners, dy, weights, order, *choice)
    return found


def _kind(dy: Tensor, x: Tensor, k: Tensor, weights: Weights, machine: Machine, *how: bool) -> Hashable:
    """The kind of a backward, on which its plan depends; None where weights lie apart, or where no bulk copy begins."""
    given = weights.w_in, weights.b_in, weights.w_up, weights.b_up, weights.w_out
    if any(w is not None and (w.data_ptr() & ALIGNED or not w.is_contiguous()) for w in given):
        return None
    shapes = weights.w_in.shape, dy.shape[1], weights.b_in is None, weights.form, weights.act
    return kind_of_rows(x), kind_of_rows(dy), kind_of_k(k, x.shape[0]), rounding(x.dtype), shapes, machine, how


def _of_choice(reach_TN: Tensor, dy: Tensor, weights: Weights, order: Order, dtype: torch.dtype, k_min: int) -> Tensor:
    """The gradient of nu [T, C]: of choosing k, what reaches its learners and its b_out."""
    of_learners = torch.empty_like(reach_TN).index_copy_(0, order.perm.long(), reach_TN).to(dtype)
    of_bias = dy.to(dtype) @ weights.b_out.to(dtype).T
    return (F.pad(of_learners.cumsum(1), (1, 0)) + of_bias)[:, k_min:]
