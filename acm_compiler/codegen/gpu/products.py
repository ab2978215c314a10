"""Launches of single products: layer 1, and the products of layer 2, with weights given by each call or kept."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.dispatch import Order
from acm_compiler.codegen.gpu.layers import layer1_kernel, layer2_kernel
from acm_compiler.codegen.gpu.spec import KernelSpec
from acm_compiler.codegen.gpu.stages import (
    BULK_COPY_BYTES,
    Loads,
    Machine,
    Product,
    build_options,
    constants_for,
    layer1_constants,
    layer2_constants,
    loads_of,
)
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, blocks_of, fewer, is_tracing
from acm_compiler.codegen.gpu.tiles import Tile


class Grid:
    """Number of programs: as many as fit the machine at once, or as there are tiles if those are fewer."""

    __slots__ = ("_columns", "_extra", "_most", "_rows")

    def __init__(self, machine: Machine, tile: Tile, columns: int, extra: int = 0) -> None:
        self._most, self._rows = machine.processors * tile.resident, tile.m
        self._columns, self._extra = blocks_in(columns, tile.n), extra

    def __call__(self, tokens: Any) -> Any:
        return fewer(self._most, (blocks_in(tokens, self._rows) + self._extra) * self._columns)


class AsOperand:
    """Makes of a matrix of weights the operand that a product takes."""

    __slots__ = ("_block", "_descriptor", "_turns")

    def __init__(self, tile: Tile, loads: Loads) -> None:
        self._block, self._turns = loads.block_of_weights(tile), tile.turns
        self._descriptor = loads.w_desc

    def __call__(self, matrix: Tensor) -> Any:
        return operand(matrix, *self._block, self._descriptor, turns=self._turns)


class Kept(NamedTuple):
    """Values of a first layer that a backward reads, [T, hidden_row] in sorted order: h, branches' sums with biases.

    The first branch's are h itself where there is no activation.
    """

    h: Tensor
    first: Tensor
    up: Tensor | None


class Layer1:
    """The hidden buffer [T, hidden_row] in sorted order; what no token of a row tile needs stays unwritten.

    in_order: x is given in sorted order on any machine. turned: weights are given as [D, N * H].
    """

    def __init__(
        self, spec: KernelSpec, machine: Machine, tile: Tile, *, in_order: bool = False, turned: bool = False
    ) -> None:
        loads = loads_of(spec, machine, None, in_order=in_order, turned=turned)
        self._row, self._d_in = spec.hidden_row, spec.d_in
        self._is_gated, self._is_product = spec.form == "gated", spec.form != "gated" and spec.act == "identity"
        self._as_operand = AsOperand(tile, loads)
        self._columns = spec.learners * spec.width if turned else spec.d_in
        self._blocks, self._turns = (tile.m, tile.k) if loads.a_desc else None, tile.turns
        self._grid = Grid(machine, tile, spec.learners * spec.width)
        kernel, constants = layer1_kernel, layer1_constants(spec, tile, loads, interpret=INTERPRETED)
        if tile.turns:
            kernel = layers_in_turns().layer1_kernel
            constants = constants_for(kernel, constants, tile)
        options = build_options(spec, tile, loads, machine)
        self._start, self._start_keeping = (Launcher(kernel, constants, options) for _ in range(2))

    def operands(
        self, w_in: Tensor, b_in: Tensor | None, w_up: Tensor | None = None, b_up: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Weights of any shape as the kernel takes them."""
        both = (
            None if matrix is None else self._as_operand(matrix.contiguous().view(-1, self._columns))
            for matrix in (w_in, w_up)
        )
        first, up = both
        return first, flat(b_in), up, flat(b_up)

    def __call__(self, x_TD: Tensor, order: Order, operands: tuple[Any, ...]) -> Tensor:
        return self._run(self._start, (self._empty(x_TD), None, None), x_TD, order, operands)

    def keeping(self, x_TD: Tensor, order: Order, operands: tuple[Any, ...]) -> Kept:
        """The hidden buffer, and what is before activations."""
        if self._is_product:
            h = self(x_TD, order, operands)
            return Kept(h, h, None)
        outputs = self._empty(x_TD), self._empty(x_TD), self._empty(x_TD) if self._is_gated else None
        self._run(self._start_keeping, outputs, x_TD, order, operands)
        return Kept(*outputs)

    def _empty(self, x_TD: Tensor) -> Tensor:
        return x_TD.new_empty(x_TD.shape[0], self._row)

    def _run(self, start: Launcher, outputs: Any, x_TD: Tensor, order: Order, operands: tuple[Any, ...]) -> Tensor:
        tokens, blocks, stride = x_TD.shape[0], self._blocks, x_TD.stride(0)
        x: Any = x_TD if blocks is None else blocks_of(x_TD, *blocks, turns=self._turns)
        start(self._grid(tokens), *outputs, x, *operands, order.perm, order.counts, tokens, self._d_in, stride)
        return outputs[0]


class Layer2:
    """One product of layer 2, into rows of y. misplaced: it reads x as it was given, which may lie anywhere.

    turned: weights are given as [reduction, O].
    """

    def __init__(
        self,
        spec: KernelSpec,
        machine: Machine,
        tile: Tile,
        product: Product,
        *,
        misplaced: bool = False,
        turned: bool = False,
    ) -> None:
        loads = loads_of(spec, machine, product, turned=turned)
        assert not (loads.a_desc and misplaced)
        self.from_x, self.product = product.from_x, product
        self._as_operand, self._d_in = AsOperand(tile, loads), spec.d_in
        self._columns = spec.d_out if turned else reduction_of(spec, product)
        self._blocks, self._turns = (tile.m, tile.k) if loads.a_desc else None, tile.turns
        self._grid = Grid(machine, tile, spec.d_out, spec.learners if product.own else 1)
        kernel, constants = layer2_kernel, layer2_constants(spec, tile, loads, product, interpret=INTERPRETED)
        if tile.turns:
            kernel = layers_in_turns().layer2_kernel
            constants = constants_for(kernel, constants, tile)
        self._start = Launcher(kernel, constants, build_options(spec, tile, loads, machine))

    def operands(self, weights: Weights) -> tuple[Any, ...]:
        """The product's matrix, as the kernel takes it, and b_out."""
        w = {"w_in": weights.w_in, "w_up": weights.w_up, "w_out": weights.w_out, "w_top": weights.w_top}
        matrix = w[self.product.weight]
        assert matrix is not None
        b_out = weights.b_out.contiguous() if self.product.bias else None
        return self._as_operand(matrix.contiguous().view(-1, self._columns)), b_out

    def __call__(
        self, y_TO: Tensor, a: Tensor, residual: Tensor | None, order: Order, operands: tuple[Any, ...]
    ) -> None:
        tokens, blocks = y_TO.shape[0], self._blocks
        self._start(
            self._grid(tokens),
            y_TO,
            a if blocks is None else blocks_of(a, *blocks, turns=self._turns),
            *operands,
            residual,
            order.perm,
            order.counts,
            tokens,
            self._d_in,
            a.stride(0),
            self._columns,
            0 if residual is None else residual.stride(0),
        )


def layers_in_turns() -> Any:
    """The layers' kernels in Gluon, which is not imported where a Triton has another one, or none."""
    from acm_compiler.codegen.gpu.turns import layers

    return layers


def reduction_of(spec: KernelSpec, product: Product) -> int:
    """Columns of a product's weights, whose rows belong to outputs."""
    reduction = spec.d_in if product.reduce in ("all", "rows") else spec.width
    return reduction * (spec.learners if product.reduce == "learners" else 1)


def by_rows(matrix: Tensor) -> Tensor:
    """The matrix, copied where its rows are not contiguous."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def operand(matrix: Tensor, rows: int, columns: int, descriptor: bool, *, turns: bool = False) -> Any:
    """Weights as a kernel takes them: their pointer, or a descriptor of blocks."""
    matrix = by_rows(matrix)
    if not descriptor:
        return matrix
    return blocks_of(matrix.clone() if _is_misplaced(matrix) else matrix, rows, columns, turns=turns)


def _is_misplaced(matrix: Tensor) -> bool:
    """True if no bulk copy begins where a tensor does; of one that is traced Inductor looks after that."""
    return not is_tracing() and matrix.data_ptr() % BULK_COPY_BYTES != 0


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """A tensor that may be absent, contiguous."""
    return None if tensor is None else tensor.contiguous()


def flat(bias: Tensor | None) -> Tensor | None:
    """A bias that may be absent, in one row."""
    return None if bias is None else bias.reshape(-1)
