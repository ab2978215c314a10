"""The launches of one gate for calls of one kind: the constants of its kernels, and its plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from acm_compiler.acm.arguments import GateArguments, GateWeights, part
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.blocks import kernel_options
from acm_compiler.codegen.gpu.dispatch import Histogram, slots_of
from acm_compiler.codegen.gpu.gate_kernel import gate_kernel, gate_part_kernel, gate_sum_kernel
from acm_compiler.codegen.gpu.gate_spec import FEW, NARROWEST, Cut, GateSpec, cut_of, padded_size
from acm_compiler.codegen.gpu.one_token import one_part_kernel
from acm_compiler.codegen.gpu.products import operand
from acm_compiler.codegen.gpu.spec import DTYPES
from acm_compiler.codegen.gpu.stages import BULK_COPY_BYTES, Machine, constants_for
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, blocks_of, is_tracing
from acm_compiler.codegen.gpu.tiles import bucket_of

_SUM_ROWS = (FEW, 1), (1 << 11, 8)  # most tokens, rows of a program that adds up
_MOST_SUM_ROWS = 32
_SUM_COLUMNS = 512, 128  # that are added up at once: of one row; of several, by one warp
_SUM_VALUES = 12 << 10  # of parts and of the second weight that a program of one row holds
_WARP_VALUES = 64  # scores of a warp's rows


class Choice(NamedTuple):
    """k of every token, int32 [T], and its histogram where calls of so many tokens are sorted by one."""

    k: Tensor
    histogram: Histogram | None


def gate_constants(spec: GateSpec, cut: Cut, *, interpret: bool) -> dict[str, Any]:
    """Constants of `gate_kernel`."""
    return {**_choice_constants(spec, interpret), **_product_constants(spec, cut)}


def part_constants(spec: GateSpec, cut: Cut, *, interpret: bool) -> dict[str, Any]:
    """Constants of `gate_part_kernel`."""
    return {"G": spec.width, "ROW": _row_of(spec), "INTERPRET": interpret, **_product_constants(spec, cut)}


def sum_constants(spec: GateSpec, cut: Cut, tokens: int, *, interpret: bool) -> dict[str, Any]:
    """Constants of `gate_sum_kernel`: a program for each of few tokens; of more, each warp has rows of its own."""
    rows = next((rows for most, rows in _SUM_ROWS if tokens <= most), _MOST_SUM_ROWS)
    spans = blocks_in(spec.d_in, cut.span)
    padded, columns = triton.next_power_of_2(spans), _SUM_COLUMNS[rows > 1]
    while rows == 1 and columns > NARROWEST and (padded + padded_size(spec.columns)) * columns > _SUM_VALUES:
        columns //= 2
    return {
        **_choice_constants(spec, interpret),
        "SPANS": spans,
        "SPANS_P": padded,
        "ROW": _row_of(spec),
        "GP": min(padded_size(spec.width), columns),
        "BM": rows,
    }


def _row_of(spec: GateSpec) -> int:
    """Elements between rows of a part, so that every row is aligned."""
    return blocks_in(spec.width, NARROWEST) * NARROWEST


def _product_constants(spec: GateSpec, cut: Cut) -> dict[str, Any]:
    """Constants of the first product; fp32 gates multiply in three tf32 parts, which keeps fp32's digits."""
    return {
        "BULK": cut.bulk,
        "EVEN": spec.d_in % cut.tile.k == 0,
        "PRECISION": "tf32x3",
        "GP": cut.tile.n,
        "BM": cut.tile.m,
        "BK": cut.tile.k,
    }


def _choice_constants(spec: GateSpec, interpret: bool) -> dict[str, Any]:
    return {
        "G": spec.width,
        "C": spec.columns,
        "K_MIN": spec.k_min,
        "RULE": spec.rule,
        "SLOTS": slots_of(spec.k_min + spec.columns - 1),
        "INTERPRET": interpret,
        "CP": padded_size(spec.columns),
    }


def _is_aligned(x_TD: Tensor) -> bool:
    """True if bulk copies may read the rows; where one that is traced begins, Inductor keeps to the graph's offset."""
    start = x_TD.storage_offset() * x_TD.itemsize if is_tracing() else x_TD.data_ptr()
    return all(isinstance(n, int) and n % BULK_COPY_BYTES == 0 for n in (start, x_TD.stride(0) * x_TD.itemsize))


def sum_options(constants: dict[str, Any]) -> dict[str, int]:
    """Warps of `gate_sum_kernel`."""
    return kernel_options(warps=min(16, max(4, constants["BM"] * constants["CP"] // _WARP_VALUES)))


def run_gate(call: GateArguments, *, cost: float, k_min: int, rule: str, machine: Machine) -> Tensor:
    """k of every token, int32 [T], as `acm::gate` gives it; scores are kept in fp32 throughout.

    Types of tokens and weights are among DTYPES.
    """
    if not call.x.shape[0]:
        return call.x.new_empty(0, dtype=torch.int32)
    x_TD = call.x if call.x.stride(-1) == 1 else call.x.contiguous()
    plan = GatePlan(call._replace(x=x_TD), cost=cost, k_min=k_min, rule=rule, machine=machine)
    return plan(x_TD, call.knob, call.k_lo, call.k_hi).k


class GatePlan:
    """The launches of one gate for calls like `call`, with as many tokens as its bucket has.

    cut: another choice than `cut_of`'s, for measurements.
    """

    def __init__(
        self,
        call: GateArguments,
        *,
        cost: float,
        k_min: int,
        rule: str,
        machine: Machine,
        tokens: Any = None,
        cut: Cut | None = None,
    ) -> None:
        self._weights = weights = GateWeights(*(tensor.contiguous() for tensor in part(GateWeights, call)))
        spec = GateSpec(
            d_in=call.x.shape[1],
            width=weights.w_inner.shape[0],
            columns=weights.w_outer.shape[0],
            k_min=k_min,
            rule=rule,
            dtype=DTYPES[call.x.dtype],
            gate_dtype=DTYPES[weights.w_inner.dtype],
        )
        bucket = bucket_of(call.x.shape[0] if tokens is None else tokens)
        self._d_in, self._cost = spec.d_in, cost
        self._slots = slots_of(k_min + spec.columns - 1) if 1 << bucket > FEW else 0
        self._cut = cut = cut or cut_of(spec, 1 << bucket, machine, aligned=_is_aligned(call.x))
        self._w_inner = operand(weights.w_inner, cut.tile.n, cut.tile.k, cut.bulk)
        options = kernel_options(warps=cut.tile.warps, stages=cut.tile.stages)
        self._parts: Launcher | None = None
        if spec.is_split:
            kernel = one_part_kernel if cut.tile.m == 1 else gate_part_kernel
            constants = constants_for(kernel, part_constants(spec, cut, interpret=INTERPRETED), cut.tile)
            self._parts = Launcher(kernel, constants, options)
            self._columns = blocks_in(_row_of(spec), cut.tile.n)
            sums = sum_constants(spec, cut, 1 << bucket, interpret=INTERPRETED)
            self._spans, self._row, self._block = sums["SPANS"], sums["ROW"], sums["BM"]
            self._start = Launcher(gate_sum_kernel, sums, sum_options(sums))
            return
        self._block = cut.tile.m
        self._start = Launcher(gate_kernel, gate_constants(spec, cut, interpret=INTERPRETED), options)

    def __call__(self, x_TD: Tensor, knob: Tensor, k_lo: Tensor, k_hi: Tensor) -> Choice:
        """The choice of T >= 1 tokens, whose rows are contiguous."""
        tokens, weights = x_TD.shape[0], self._weights
        k_T = x_TD.new_empty(tokens, dtype=torch.int32)
        programs = blocks_in(tokens, self._block)
        counts = k_T.new_empty(programs * self._slots) if self._slots else None
        cut, stride = self._cut, x_TD.stride(0)
        x: Any = blocks_of(x_TD, cut.tile.m, cut.tile.k) if cut.bulk else x_TD
        if self._parts is not None:
            parts = x_TD.new_empty(self._spans, tokens, self._row, dtype=torch.float32)
            tiles = self._spans * blocks_in(tokens, cut.tile.m) * self._columns
            self._parts(tiles, parts, x, self._w_inner, tokens, self._d_in, cut.span, stride)
            self._start(programs, k_T, counts, parts, *weights[1:], knob, k_lo, k_hi, tokens, self._cost)
        else:
            self._start(
                programs, k_T, counts, x, self._w_inner, *weights[1:], knob, k_lo, k_hi, tokens, self._d_in, stride,
                self._cost,
            )  # fmt: skip
        return Choice(k_T, None if counts is None else Histogram(counts, self._block))
