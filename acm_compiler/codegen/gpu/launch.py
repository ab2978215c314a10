"""The launches of one ACM's learners for calls of one kind: rows sorted or gathered, layer 1, the products of layer 2.

A plan holds what does not change between such calls: constants, tiles, built kernels, and the weights as kernels take
them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from acm_compiler.acm.reference import Norm, Weights
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.dispatch import Histogram, Order, Rows, Sort
from acm_compiler.codegen.gpu.few_tokens import few1_kernel, few2_kernel, few_sum_kernel
from acm_compiler.codegen.gpu.layers import layer1_kernel, layer2_kernel
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of
from acm_compiler.codegen.gpu.stages import (
    BULK_COPY_BYTES,
    Machine,
    Product,
    build_options,
    few1_constants,
    few2_constants,
    few_options,
    few_sum_constants,
    few_sum_options,
    layer1_bands,
    layer1_constants,
    layer2_constants,
    loads_of,
    permutes_rows,
    products_of,
)
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, blocks_of, fewer, is_tracing
from acm_compiler.codegen.gpu.tiles import Tile, Tiles, bucket_of, choose_tiles


class Plan(Protocol):
    """Launches for calls of one kind, with as many tokens as its bucket has."""

    def __call__(
        self, x_TD: Tensor, k_T: Tensor, residual: Tensor | None, histogram: Histogram | None = None
    ) -> Tensor:
        """y_{k(t)}(x_t) + residual_t, [T, O], of T >= 1 tokens; rows of x and of the residual are contiguous.

        histogram: of k, where the gate that chose it wrote one.
        """
        ...


def run(
    x_TD: Tensor,
    k_T: Tensor,
    weights: Weights,
    *,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    machine: Machine,
) -> Tensor:
    """y_{k(t)}(x_t) + residual_t, [T, O], for a call that the kernels cover; no host sync. norm: applied to x first.

    A k outside [0, N] stops the kernel with an assertion on the device, or, among few tokens, gives NaN.
    """
    if not x_TD.shape[0]:
        return x_TD.new_empty(0, weights.b_out.shape[1])
    x_TD, residual = by_rows(x_TD), None if residual is None else by_rows(residual)
    plan = plan_of(spec_of(x_TD, weights, residual, norm=norm), weights, norm, machine, x_TD.shape[0])
    return plan(x_TD, k_T.contiguous(), residual)


def by_rows(matrix: Tensor) -> Tensor:
    """The matrix, copied where its rows are not contiguous."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def plan_of(spec: KernelSpec, weights: Weights, norm: Norm | None, machine: Machine, tokens: Any) -> Plan:
    """The plan for calls of about so many tokens."""
    bucket = bucket_of(tokens)
    tiles = choose_tiles(spec, machine.arch, 1 << bucket, machine.processors)
    if tiles.sorts:
        return SortedPlan(spec, weights, norm, machine=machine, tiles=tiles, bucket=bucket)
    return FewPlan(spec, weights, norm, tiles=tiles)


class FewPlan:
    """Tokens that fit one row tile, which nothing sorts."""

    def __init__(self, spec: KernelSpec, weights: Weights, norm: Norm | None, *, tiles: Tiles) -> None:
        w = weights
        assert w.w_out is not None
        self._spec = spec
        self._rows = None if norm is None else Rows(spec.d_in, in_order=False, norm=norm)
        self._first = w.w_in.contiguous(), _flat(w.b_in), _contiguous(w.w_up), _flat(w.b_up)
        self._second = w.w_out.contiguous(), w.b_out.contiguous()
        self._top = _contiguous(w.w_top)
        self._splits, columns = tiles.splits, spec.learners * spec.width
        self._programs = blocks_in(columns, tiles.layer1.n), blocks_in(spec.d_out, tiles.layer2.n) * tiles.splits
        constants = few1_constants(spec, tiles.layer1, interpret=INTERPRETED)
        self._start1 = Launcher(few1_kernel, constants, few_options(tiles.layer1))
        constants = few2_constants(spec, tiles.layer2, tiles.splits, interpret=INTERPRETED)
        self._start2 = Launcher(few2_kernel, constants, few_options(tiles.layer2))
        if tiles.splits > 1:
            constants = few_sum_constants(spec, tiles.splits)
            self._blocks = blocks_in(spec.d_out, constants["BN"])
            self._sum = Launcher(few_sum_kernel, constants, few_sum_options())

    def __call__(
        self, x_TD: Tensor, k_T: Tensor, residual: Tensor | None, histogram: Histogram | None = None
    ) -> Tensor:
        spec, tokens, splits = self._spec, x_TD.shape[0], self._splits
        x_TD = x_TD if self._rows is None else self._rows(x_TD, None)
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
        norm: Norm | None,
        *,
        machine: Machine,
        tiles: Tiles,
        bucket: int,
    ) -> None:
        in_order = permutes_rows(spec, machine)
        self._d_out = spec.d_out
        self._sort = Sort(spec.learners, bucket)
        self._rows = Rows(spec.d_in, in_order=in_order, norm=norm) if in_order or norm else None
        self._layer1 = Layer1(spec, weights, machine, tiles.layer1) if layer1_bands(spec) else None
        self._products = [
            Layer2(spec, weights, machine, tiles.layer2, product, misplaced=product.from_x and self._rows is None)
            for product in products_of(spec)
        ]

    def __call__(
        self, x_TD: Tensor, k_T: Tensor, residual: Tensor | None, histogram: Histogram | None = None
    ) -> Tensor:
        order = self._sort(k_T, histogram)
        y_TO = x_TD.new_empty(x_TD.shape[0], self._d_out)
        x_TD = x_TD if self._rows is None else self._rows(x_TD, order)
        h = x_TD if self._layer1 is None else self._layer1(x_TD, order)
        for layer2 in self._products:
            layer2(y_TO, x_TD if layer2.from_x else h, residual, order)
        return y_TO


class _Grid:
    """Number of programs: as many as fit the machine at once, or as there are tiles if those are fewer."""

    __slots__ = ("_columns", "_extra", "_most", "_rows")

    def __init__(self, machine: Machine, tile: Tile, columns: int, extra: int = 0) -> None:
        self._most, self._rows = machine.processors * tile.resident, tile.m
        self._columns, self._extra = blocks_in(columns, tile.n), extra

    def __call__(self, tokens: Any) -> Any:
        return fewer(self._most, (blocks_in(tokens, self._rows) + self._extra) * self._columns)


class Layer1:
    """The hidden buffer [T, hidden_row] in sorted order; what no token of a row tile needs stays unwritten.

    in_order: x is given in sorted order on any machine.
    """

    def __init__(
        self, spec: KernelSpec, weights: Weights, machine: Machine, tile: Tile, *, in_order: bool = False
    ) -> None:
        loads, w = loads_of(spec, machine, None, in_order=in_order), weights
        self._row, self._d_in = spec.hidden_row, spec.d_in
        self._blocks = (tile.m, tile.k) if loads.a_desc else None
        self._grid = _Grid(machine, tile, spec.learners * spec.width)
        w_in, w_up = (
            None if matrix is None else operand(matrix.reshape(-1, spec.d_in), tile.n, tile.k, loads.w_desc)
            for matrix in (w.w_in, w.w_up)
        )
        self._weights = w_in, _flat(w.b_in), w_up, _flat(w.b_up)
        self._start = Launcher(
            layer1_kernel,
            layer1_constants(spec, tile, loads, interpret=INTERPRETED),
            build_options(spec, tile, loads, machine),
        )

    def __call__(self, x_TD: Tensor, order: Order) -> Tensor:
        tokens, blocks = x_TD.shape[0], self._blocks
        h, stride = x_TD.new_empty(tokens, self._row), x_TD.stride(0)
        x: Any = x_TD if blocks is None else blocks_of(x_TD, *blocks)
        self._start(self._grid(tokens), h, x, *self._weights, order.perm, order.counts, tokens, self._d_in, stride)
        return h


class Layer2:
    """One product of layer 2, into rows of y. misplaced: it reads x as it was given, which may lie anywhere."""

    def __init__(
        self,
        spec: KernelSpec,
        weights: Weights,
        machine: Machine,
        tile: Tile,
        product: Product,
        *,
        misplaced: bool,
    ) -> None:
        loads, w = loads_of(spec, machine, product), _matrix(spec, product, weights)
        assert not (loads.a_desc and misplaced)
        self.from_x = product.from_x
        self._blocks = (tile.m, tile.k) if loads.a_desc else None
        self._grid = _Grid(machine, tile, spec.d_out, spec.learners if product.own else 1)
        b_out = weights.b_out.contiguous() if product.bias else None
        self._weights = operand(w, tile.n, tile.k, loads.w_desc), b_out
        self._d_in, self._stride_w = spec.d_in, w.stride(0)
        self._start = Launcher(
            layer2_kernel,
            layer2_constants(spec, tile, loads, product, interpret=INTERPRETED),
            build_options(spec, tile, loads, machine),
        )

    def __call__(self, y_TO: Tensor, a: Tensor, residual: Tensor | None, order: Order) -> None:
        tokens, blocks = y_TO.shape[0], self._blocks
        self._start(
            self._grid(tokens),
            y_TO,
            a if blocks is None else blocks_of(a, *blocks),
            *self._weights,
            residual,
            order.perm,
            order.counts,
            tokens,
            self._d_in,
            a.stride(0),
            self._stride_w,
            0 if residual is None else residual.stride(0),
        )


def _matrix(spec: KernelSpec, product: Product, weights: Weights) -> Tensor:
    """The product's weights as rows of its inner product: [O, reduction], or all of them, one below the other."""
    w = {"w_in": weights.w_in, "w_out": weights.w_out, "w_top": weights.w_top}[product.weight]
    assert w is not None
    reduction = spec.d_in if product.reduce in ("all", "rows") else spec.width
    return w.contiguous().reshape(-1, reduction * (spec.learners if product.reduce == "learners" else 1))


def operand(matrix: Tensor, rows: int, columns: int, descriptor: bool) -> Any:
    """Weights as a kernel takes them: their pointer, or a descriptor of blocks."""
    matrix = by_rows(matrix)
    if not descriptor:
        return matrix
    whole = matrix.clone() if _is_misplaced(matrix) else matrix
    return blocks_of(whole, rows, columns)


def _is_misplaced(matrix: Tensor) -> bool:
    """True if no bulk copy begins where a tensor does; of one that is traced Inductor looks after that."""
    return not is_tracing() and matrix.data_ptr() % BULK_COPY_BYTES != 0


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.reshape(-1)
