"""The launches of one gate for calls of one kind: its spec, the constants of its kernels, and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from acm_compiler.acm.arguments import GateArguments, GateWeights, part
from acm_compiler.acm.reference import Norm
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.blocks import kernel_options
from acm_compiler.codegen.gpu.dispatch import Histogram, slots_of
from acm_compiler.codegen.gpu.gate_kernel import gate_kernel, gate_part_kernel, gate_sum_kernel
from acm_compiler.codegen.gpu.spec import DTYPES
from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.codegen.gpu.start import Launcher, blocks_in
from acm_compiler.codegen.gpu.tiles import bucket_of
from acm_compiler.planning.decisions import PlannedSite

_WIDEST = 256  # columns of the first product that a program takes at once
_WIDE = 128  # of those of wider gates, and of exact ones, whose operands need registers for their parts
_NARROWEST = 16  # of a matrix product
_LARGE = 128
_FEW = 64  # tokens, whose gates are split if their first weight has as many elements as
_HEAVY = 1 << 18
_PARTS = (32, 512)  # columns and features of one program of a split gate


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """One gate as its kernel sees it: dtype of the tokens and of the gate itself, sizes, rule; norm: tokens are
    normalised first; centred: by a LayerNorm, else an RMSNorm.
    """

    d_in: int
    width: int
    columns: int
    k_min: int
    rule: str
    dtype: str
    gate_dtype: str
    norm: bool
    centred: bool = True

    @property
    def is_exact(self) -> bool:
        """True if products are in fp32, of three tf32 parts."""
        return "fp32" in (self.dtype, self.gate_dtype)

    @property
    def is_odd(self) -> bool:
        """True if rows begin anywhere, so that Triton reads them value by value, which takes registers."""
        return self.d_in % 16 != 0

    def is_split(self, tokens: int) -> bool:
        """True if so few tokens take the first product in parts, as one program would read all of its weight."""
        return tokens <= _FEW and self.d_in * self.width >= _HEAVY


class Choice(NamedTuple):
    """k of every token, int32 [T], and its histogram where calls of so many tokens are sorted by one."""

    k: Tensor
    histogram: Histogram | None


def gate_spec_of_site(site: PlannedSite, dtype: str, *, norm: bool = False) -> GateSpec:
    """The spec of a planned site's gate, in the type of its tokens, by the rule of a calibrated one."""
    kind = "fp32" if dtype == "tf32" else dtype
    return GateSpec(
        d_in=site.d_in,
        width=site.gate_width,
        columns=site.columns,
        k_min=site.k_min,
        rule="damage",
        dtype=kind,
        gate_dtype=kind,
        norm=norm,
    )


def gate_constants(spec: GateSpec, tokens: int, *, interpret: bool) -> dict[str, Any]:
    """Constants of `gate_kernel`; fp32 gates multiply in three tf32 parts, which keeps fp32's digits."""
    width = max(_NARROWEST, triton.next_power_of_2(spec.width))
    width = width if width <= (_WIDE if spec.is_exact else _WIDEST) else _WIDE
    step = 64 // (2 if spec.is_exact else 1) // (2 if width > _LARGE else 1)
    if spec.is_odd and width >= _LARGE:
        step //= 2
    # products of three parts and of normalised blocks take 32 rows: they stay off wgmma, whose register operands old
    # ptxas gets wrong
    rows = 32 if spec.is_exact or spec.norm or width > _LARGE // 2 else 64
    return {
        **_choice_constants(spec, interpret),
        "SLOTS": slots_of(spec.k_min + spec.columns - 1),
        "EVEN": spec.d_in % step == 0,
        "NORM": spec.norm,
        "CENTRED": spec.centred,
        "PRECISION": "tf32x3",
        "GP": width,
        "BM": min(rows, max(_NARROWEST, triton.next_power_of_2(tokens))),
        "BK": step,
    }


def part_constants(spec: GateSpec, tokens: int, *, interpret: bool) -> dict[str, Any]:
    """Constants of `gate_part_kernel`."""
    step = (32 if spec.is_exact else 128) // (2 if spec.is_odd else 1)
    shared = _shared_constants(spec, tokens)
    return {
        "G": spec.width,
        "SPAN": _PARTS[1],
        "EVEN": spec.d_in % step == 0,
        "NORM": spec.norm,
        "CENTRED": spec.centred,
        "PRECISION": "tf32x3",
        "INTERPRET": interpret,
        **shared,
        "BM": min(32, shared["ROWS"]) if spec.is_exact or spec.norm else shared["ROWS"],  # as in `gate_constants`
        "BK": step,
    }


def sum_constants(spec: GateSpec, tokens: int, *, interpret: bool) -> dict[str, Any]:
    """Constants of `gate_sum_kernel`."""
    return {**_choice_constants(spec, interpret), **_shared_constants(spec, tokens), "BM": _NARROWEST}


def _shared_constants(spec: GateSpec, tokens: int) -> dict[str, Any]:
    """Shape of the parts: rows and elements of a row, in blocks of GP."""
    columns = _PARTS[0]
    rows = max(_NARROWEST, triton.next_power_of_2(tokens))
    return {"ROWS": rows, "ROW": blocks_in(spec.width, columns) * columns, "GP": columns}


def _choice_constants(spec: GateSpec, interpret: bool) -> dict[str, Any]:
    return {
        "G": spec.width,
        "C": spec.columns,
        "K_MIN": spec.k_min,
        "RULE": spec.rule,
        "INTERPRET": interpret,
        "CP": max(_NARROWEST, triton.next_power_of_2(spec.columns)),
    }


def gate_options(spec: GateSpec, machine: Machine, constants: dict[str, Any]) -> dict[str, int]:
    """Warps and pipeline stages of `gate_kernel` and `gate_part_kernel` (see Machine for `fenced`)."""
    unsafe = machine.bulk_copies and not machine.fenced and constants["BM"] >= 64
    stages = 3
    if spec.is_exact and "SPAN" in constants:
        stages = 5  # of shorter steps, so that as many bytes are on their way
    elif spec.is_exact and spec.is_odd and constants["GP"] >= _LARGE:
        stages = 2  # values that are read one by one wait in registers
    return kernel_options(warps=4, stages=1 if unsafe else stages)


def run_gate(
    call: GateArguments, *, cost: float, k_min: int, rule: str, machine: Machine, norm: Norm | None = None
) -> Tensor:
    """k of every token, int32 [T], as `acm::gate` gives it; scores are kept in fp32 throughout.

    Types of tokens and weights are among DTYPES. norm: applied to the tokens first.
    """
    if not call.x.shape[0]:
        return call.x.new_empty(0, dtype=torch.int32)
    x_TD = call.x if call.x.stride(-1) == 1 else call.x.contiguous()
    plan = GatePlan(call._replace(x=x_TD), cost=cost, k_min=k_min, rule=rule, machine=machine, norm=norm)
    return plan(x_TD, call.knob, call.k_lo, call.k_hi).k


class GatePlan:
    """The launches of one gate for calls like `call`, with as many tokens as its bucket has."""

    def __init__(
        self,
        call: GateArguments,
        *,
        cost: float,
        k_min: int,
        rule: str,
        machine: Machine,
        norm: Norm | None = None,
        tokens: Any = None,
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
            norm=norm is not None,
            centred=norm is None or norm.centred,
        )
        bucket = bucket_of(call.x.shape[0] if tokens is None else tokens)
        affine = (None, None) if norm is None else (norm.weight, norm.bias)
        self._norm = tuple(None if tensor is None else tensor.contiguous() for tensor in affine)
        self._d_in, self._cost, self._eps = spec.d_in, cost, 0.0 if norm is None else norm.eps
        self._slots = slots_of(k_min + spec.columns - 1) if 1 << bucket > _FEW else 0
        self._parts: Launcher | None = None
        if spec.is_split(1 << bucket):
            constants = part_constants(spec, 1 << bucket, interpret=INTERPRETED)
            self._parts = Launcher(gate_part_kernel, constants, gate_options(spec, machine, constants))
            self._spans = blocks_in(spec.d_in, constants["SPAN"])
            self._room = rows, row = constants["ROWS"], constants["ROW"]
            self._programs = self._spans * (rows // constants["BM"]) * (row // constants["GP"])
            sums = sum_constants(spec, 1 << bucket, interpret=INTERPRETED)
            self._rows, self._start = sums["BM"], Launcher(gate_sum_kernel, sums, kernel_options(warps=4))
            return
        constants = gate_constants(spec, 1 << bucket, interpret=INTERPRETED)
        self._rows, self._start = (
            constants["BM"],
            Launcher(gate_kernel, constants, gate_options(spec, machine, constants)),
        )

    def __call__(self, x_TD: Tensor, knob: Tensor, k_lo: Tensor, k_hi: Tensor) -> Choice:
        """The choice of T >= 1 tokens, whose rows are contiguous."""
        tokens, stride, weights = x_TD.shape[0], x_TD.stride(0), self._weights
        k_T = x_TD.new_empty(tokens, dtype=torch.int32)
        programs = blocks_in(tokens, self._rows)
        if self._parts is not None:
            parts = x_TD.new_empty(self._spans, *self._room, dtype=torch.float32)
            self._parts(self._programs, parts, x_TD, weights[0], *self._norm, tokens, self._d_in, stride, self._eps)
            self._start(programs, k_T, parts, *weights[1:], knob, k_lo, k_hi, tokens, self._spans, self._cost)
            return Choice(k_T, None)
        counts = k_T.new_empty(programs * self._slots) if self._slots else None
        self._start(
            programs, k_T, counts, x_TD, *weights, knob, k_lo, k_hi, *self._norm, tokens, self._d_in, stride,
            self._cost, self._eps,
        )  # fmt: skip
        return Choice(k_T, None if counts is None else Histogram(counts, self._rows))
