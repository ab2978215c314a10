"""The launches of one ACM's learners for calls of one kind: rows sorted or gathered, layer 1, the products of layer 2.

A plan holds what does not change between such calls: constants, tiles, built kernels, and the weights as kernels take
them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.dispatch import Histogram, Order, Rows, Sort
from acm_compiler.codegen.gpu.few_tokens import few_sum_kernel
from acm_compiler.codegen.gpu.one_token import layer_kernels
from acm_compiler.codegen.gpu.products import Kept, Layer1, Layer2, by_rows, contiguous, flat
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of
from acm_compiler.codegen.gpu.stages import (
    Machine,
    constants_for,
    few1_constants,
    few2_constants,
    few_options,
    few_sum_constants,
    few_sum_options,
    layer1_bands,
    permutes_rows,
    products_of,
)
from acm_compiler.codegen.gpu.start import Launcher, blocks_in
from acm_compiler.codegen.gpu.tiles import Tiles, bucket_of, choose_tiles


class Plan(Protocol):
    """Launches for calls of one kind, with as many tokens as its bucket has."""

    def __call__(self, x_TD: Tensor, k_T: Tensor, residual: Tensor | None, order: Order | None = None) -> Tensor:
        """y_{k(t)}(x_t) + residual_t, [T, O], of T >= 1 tokens; rows of x and of the residual are contiguous.

        order: what `order` gave of the same k and x, where that was asked for.
        """
        ...

    def keeping(self, x_TD: Tensor, k_T: Tensor, order: Order) -> tuple[Tensor, Kept | None]:
        """The same without a residual, and what a backward would compute again."""
        ...

    def order(self, k_T: Tensor, histogram: Histogram | None, x_TD: Tensor) -> Order | None:
        """The order of tokens, None where nothing is sorted; histogram: of k, where its gate wrote one."""
        ...


def run(
    x_TD: Tensor,
    k_T: Tensor,
    weights: Weights,
    *,
    residual: Tensor | None = None,
    machine: Machine,
) -> Tensor:
    """y_{k(t)}(x_t) + residual_t, [T, O], for a call that the kernels cover; no host sync.

    A k outside [0, N] stops the kernel with an assertion on the device, or, among few tokens, gives NaN.
    """
    if not x_TD.shape[0]:
        return x_TD.new_empty(0, weights.b_out.shape[1])
    x_TD, residual = by_rows(x_TD), None if residual is None else by_rows(residual)
    plan = plan_of(spec_of(x_TD, weights, residual), weights, machine, x_TD.shape[0])
    return plan(x_TD, k_T.contiguous(), residual)


def plan_of(spec: KernelSpec, weights: Weights, machine: Machine, tokens: Any) -> Plan:
    """The plan for calls of about so many tokens."""
    bucket = bucket_of(tokens)
    tiles = choose_tiles(spec, machine.arch, 1 << bucket, machine.processors, turns=machine.turns)
    if tiles.sorts:
        return SortedPlan(spec, weights, machine=machine, tiles=tiles, bucket=bucket)
    return FewPlan(spec, weights, tiles=tiles)


class FewPlan:
    """One token, or tokens that fit one row tile: nothing sorts them."""

    def __init__(self, spec: KernelSpec, weights: Weights, *, tiles: Tiles) -> None:
        w = weights
        assert w.w_out is not None
        self._spec = spec
        self._first = w.w_in.contiguous(), flat(w.b_in), contiguous(w.w_up), flat(w.b_up)
        self._second = w.w_out.contiguous(), w.b_out.contiguous()
        self._top = contiguous(w.w_top)
        self._splits, columns = tiles.splits, spec.learners * spec.width
        self._programs = blocks_in(columns, tiles.layer1.n), blocks_in(spec.d_out, tiles.layer2.n) * tiles.splits
        kernel1, kernel2 = layer_kernels(tiles)
        constants = constants_for(kernel1, few1_constants(spec, tiles.layer1, interpret=INTERPRETED), tiles.layer1)
        self._start1 = Launcher(kernel1, constants, few_options(tiles.layer1))
        constants = few2_constants(spec, tiles.layer2, tiles.splits, interpret=INTERPRETED)
        constants = constants_for(kernel2, constants, tiles.layer2)
        self._start2 = Launcher(kernel2, constants, few_options(tiles.layer2))
        if tiles.splits > 1:
            constants = few_sum_constants(spec, tiles.splits)
            self._blocks = blocks_in(spec.d_out, constants["BN"])
            self._sum = Launcher(few_sum_kernel, constants, few_sum_options())

    def keeping(self, x_TD: Tensor, k_T: Tensor, order: Order | None) -> tuple[Tensor, None]:
        """Few tokens keep nothing."""
        return self(x_TD, k_T, None), None

    def order(self, k_T: Tensor, histogram: Histogram | None, x_TD: Tensor) -> None:
        """Few tokens are not sorted."""

    def __call__(self, x_TD: Tensor, k_T: Tensor, residual: Tensor | None, order: Order | None = None) -> Tensor:
        spec, tokens, splits = self._spec, x_TD.shape[0], self._splits
        h, y_TO = x_TD.new_empty(tokens, spec.hidden_row), x_TD.new_empty(tokens, spec.d_out)
        self._start1(self._programs[0], h, x_TD, *self._first, k_T, tokens, spec.d_in, x_TD.stride(0))
        stride_r = 0 if residual is None else residual.stride(0)
        top = (None, None) if self._top is None else (x_TD, self._top)
        sizes = tokens, spec.d_in, x_TD.stride(0)
        if splits == 1:
            self._start2(self._programs[1], y_TO, h, *self._second, *top, residual, k_T, *sizes, stride_r)
            return y_TO
        parts = y_TO.new_empty(splits, tokens, spec.d_out, dtype=torch.float32)
        self._start2(self._programs[1], parts, h, *self._second, *top, None, k_T, *sizes, 0)
        self._sum(tokens * self._blocks, y_TO, parts, self._second[1], residual, k_T, tokens, stride_r)
        return y_TO


class SortedPlan:
    """Any number of tokens, in the order of their k. tiles: another choice than the table's, for measurements."""

    def __init__(
        self,
        spec: KernelSpec,
        weights: Weights,
        *,
        machine: Machine,
        tiles: Tiles,
        bucket: int,
    ) -> None:
        in_order = tiles.layer1.turns or permutes_rows(spec, machine)
        self._d_out = spec.d_out
        self._sort = Sort(spec.learners, bucket, d_in=spec.d_in if in_order else None)
        self._rows = Rows(spec.d_in) if in_order and not self._sort.copies else None
        self._layer1 = Layer1(spec, machine, tiles.layer1, in_order=in_order) if layer1_bands(spec) else None
        w = weights
        self._first = self._layer1.operands(w.w_in, w.b_in, w.w_up, w.b_up) if self._layer1 is not None else ()
        products = [
            Layer2(spec, machine, tiles.layer2, product, misplaced=product.from_x and not in_order)
            for product in products_of(spec)
        ]
        self._products = [(layer2, layer2.operands(weights)) for layer2 in products]

    def order(self, k_T: Tensor, histogram: Histogram | None, x_TD: Tensor) -> Order:
        """The order in which kernels visit tokens."""
        return self._sort(k_T, histogram, x_TD)

    def __call__(self, x_TD: Tensor, k_T: Tensor, residual: Tensor | None, order: Order | None = None) -> Tensor:
        order = self.order(k_T, None, x_TD) if order is None else order
        x_TD = self._sorted(x_TD, order)
        h = x_TD if self._layer1 is None else self._layer1(x_TD, order, self._first)
        return self._second_layer(x_TD, h, residual, order)

    def keeping(self, x_TD: Tensor, k_T: Tensor, order: Order) -> tuple[Tensor, Kept | None]:
        """y of x in token order, and what the first layer has for a backward; None where there is none."""
        if self._layer1 is None:
            return self(x_TD, k_T, None, order), None
        x_TD = self._sorted(x_TD, order)
        kept = self._layer1.keeping(x_TD, order, self._first)
        return self._second_layer(x_TD, kept.h, None, order), kept

    def _sorted(self, x_TD: Tensor, order: Order) -> Tensor:
        """x as the layers read it."""
        if order.rows is not None:
            return order.rows
        return x_TD if self._rows is None else self._rows(x_TD, order)

    def _second_layer(self, x_TD: Tensor, h: Tensor, residual: Tensor | None, order: Order) -> Tensor:
        y_TO = x_TD.new_empty(x_TD.shape[0], self._d_out)
        for layer2, operands in self._products:
            layer2(y_TO, x_TD if layer2.from_x else h, residual, order, operands)
        return y_TO
