"""Start the kernels of one call, in order: rows sorted or gathered, layer 1, the products of layer 2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from acm_compiler.acm.reference import Norm, Weights
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.dispatch import Order, permute_constants, permute_kernel, permute_options, sort_by_k
from acm_compiler.codegen.gpu.few_tokens import few1_kernel, few2_kernel
from acm_compiler.codegen.gpu.layers import layer1_kernel, layer2_kernel
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of
from acm_compiler.codegen.gpu.stages import (
    BULK_COPY_BYTES,
    POINTERS,
    Machine,
    Product,
    build_options,
    few1_constants,
    few2_constants,
    layer1_bands,
    layer1_constants,
    layer2_constants,
    loads_of,
    permutes_rows,
    products_of,
)
from acm_compiler.codegen.gpu.tiles import Tile, Tiles, choose_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the operator while its kernels are started; the rows of x_TD are contiguous."""

    spec: KernelSpec
    machine: Machine
    tiles: Tiles
    order: Order
    x_TD: Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.order.perm.shape[0]

    def grid(self, tile: Tile, row_tiles: int, columns: int) -> tuple[int]:
        """Number of programs: as many as fit the machine at once, or as there are tiles if those are fewer."""
        tiles = row_tiles * triton.cdiv(columns, tile.n)
        return (min(self.machine.processors * tile.resident, tiles),)


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
    x_TD, k_T = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous(), k_T.contiguous()
    spec = spec_of(x_TD, weights, residual, norm=norm is not None)
    tiles = choose_tiles(spec, machine.arch, x_TD.shape[0])
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    if tiles.sorts:
        order = sort_by_k(k_T, spec.learners)
        call = Call(spec=spec, machine=machine, tiles=tiles, order=order, x_TD=x_TD)
        return run_call(call, weights, residual, norm)
    x_TD = x_TD if norm is None else _written_rows(x_TD, None, norm)
    return _run_few(spec, x_TD, k_T, weights, residual, tiles=tiles, machine=machine)


def _run_few(
    spec: KernelSpec, x_TD: Tensor, k_T: Tensor, w: Weights, residual: Tensor | None, *, tiles: Tiles, machine: Machine
) -> Tensor:
    """The same for tokens that fit one row tile; the rows of x_TD are contiguous."""
    tokens, d_in = x_TD.shape
    assert w.w_out is not None
    h, y_TO = x_TD.new_empty(tokens, spec.hidden_row), x_TD.new_empty(tokens, spec.d_out)
    few1_kernel[(triton.cdiv(spec.learners * spec.width, tiles.layer1.n),)](
        h,
        x_TD,
        w.w_in.contiguous(),
        _flat(w.b_in),
        None if w.w_up is None else w.w_up.contiguous(),
        _flat(w.b_up),
        k_T,
        tokens,
        d_in,
        x_TD.stride(0),
        **few1_constants(spec, tiles.layer1, interpret=INTERPRETED),
        **build_options(spec, tiles.layer1, POINTERS, machine),
    )
    few2_kernel[(triton.cdiv(spec.d_out, tiles.layer2.n),)](
        y_TO,
        h,
        w.w_out.contiguous(),
        w.b_out.contiguous(),
        residual,
        k_T,
        tokens,
        0 if residual is None else residual.stride(0),
        **few2_constants(spec, tiles.layer2, interpret=INTERPRETED),
        **build_options(spec, tiles.layer2, POINTERS, machine),
    )
    return y_TO


def run_call(call: Call, weights: Weights, residual: Tensor | None, norm: Norm | None = None) -> Tensor:
    """y_{k(t)}(x_t) + residual_t of T >= 1 tokens, [T, O]; rows of the residual are contiguous."""
    spec = call.spec
    y_TO = call.x_TD.new_empty(call.tokens, spec.d_out)
    in_order = call.order if permutes_rows(spec, call.machine) else None
    if in_order or norm:
        call = replace(call, x_TD=_written_rows(call.x_TD, in_order, norm))
    h = _run_layer1(call, weights) if layer1_bands(spec) else call.x_TD
    for product in products_of(spec):
        _run_layer2(call, product, call.x_TD if product.from_x else h, weights, y_TO=y_TO, residual=residual)
    return y_TO


def _written_rows(x_TD: Tensor, order: Order | None, norm: Norm | None) -> Tensor:
    """The rows in that order, or in their own, normalised where there is a norm."""
    tokens, d_in = x_TD.shape
    rows = x_TD.new_empty(tokens, d_in)
    weight, bias, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    constants = permute_constants(d_in, in_order=order is not None, norm=norm is not None)
    permute_kernel[(triton.cdiv(tokens, constants["BM"]),)](
        rows,
        x_TD,
        None if order is None else order.perm,
        None if order is None else order.counts,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        tokens,
        x_TD.stride(0),
        eps,
        **constants,
        **permute_options(d_in),
    )
    return rows


def _run_layer1(call: Call, weights: Weights) -> Tensor:
    """The hidden buffer [T, hidden_row] in sorted order; what no token of a row tile needs stays unwritten."""
    spec, tile, x_TD = call.spec, call.tiles.layer1, call.x_TD
    loads = loads_of(spec, call.machine, None)
    h = x_TD.new_empty(call.tokens, spec.hidden_row)

    def matrix(w_NHD: Tensor | None) -> Any:
        return None if w_NHD is None else _operand(w_NHD.reshape(-1, spec.d_in), tile.n, tile.k, loads.w_desc)

    layer1_kernel[call.grid(tile, triton.cdiv(call.tokens, tile.m), spec.learners * spec.width)](
        h,
        _operand(x_TD, tile.m, tile.k, loads.a_desc),
        matrix(weights.w_in),
        _flat(weights.b_in),
        matrix(weights.w_up),
        _flat(weights.b_up),
        call.order.perm,
        call.order.counts,
        call.tokens,
        spec.d_in,
        x_TD.stride(0),
        **layer1_constants(spec, tile, loads, interpret=INTERPRETED),
        **build_options(spec, tile, loads, call.machine),
    )
    return h


def _run_layer2(
    call: Call, product: Product, a: Tensor, weights: Weights, *, y_TO: Tensor, residual: Tensor | None
) -> None:
    spec, tile = call.spec, call.tiles.layer2
    w = _matrix(spec, product, weights)
    loads = loads_of(spec, call.machine, product)
    row_tiles = triton.cdiv(call.tokens, tile.m) + (spec.learners if product.own else 1)
    layer2_kernel[call.grid(tile, row_tiles, spec.d_out)](
        y_TO,
        _operand(a, tile.m, tile.k, loads.a_desc),
        _operand(w, tile.n, tile.k, loads.w_desc),
        weights.b_out.contiguous(),
        residual,
        call.order.perm,
        call.order.counts,
        call.tokens,
        spec.d_in,
        a.stride(0),
        w.stride(0),
        0 if residual is None else residual.stride(0),
        **layer2_constants(spec, tile, loads, product, interpret=INTERPRETED),
        **build_options(spec, tile, loads, call.machine),
    )


def _matrix(spec: KernelSpec, product: Product, weights: Weights) -> Tensor:
    """The product's weights as rows of its inner product: [O, reduction], or all of them, one below the other."""
    w = {"w_in": weights.w_in, "w_out": weights.w_out, "w_top": weights.w_top}[product.weight]
    assert w is not None
    reduction = spec.d_in if product.reduce in ("all", "rows") else spec.width
    return w.contiguous().reshape(-1, reduction * (spec.learners if product.reduce == "learners" else 1))


def _operand(matrix: Tensor, rows: int, columns: int, descriptor: bool) -> Any:
    """A matrix as a kernel takes it: its pointer, or a descriptor of blocks."""
    matrix = matrix if matrix.stride(-1) == 1 else matrix.contiguous()
    if not descriptor:
        return matrix
    whole = matrix.clone() if matrix.data_ptr() % BULK_COPY_BYTES else matrix
    return TensorDescriptor.from_tensor(whole, [rows, columns])


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.reshape(-1)
