"""The gate in one kernel: linear, GELU, linear, utilities, choice; k of every token and nothing else is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from acm_compiler.acm.arguments import GateArguments, GateWeights, part
from acm_compiler.acm.reference import Norm
from acm_compiler.codegen.gpu.activation import INTERPRETED, gelu
from acm_compiler.codegen.gpu.blocks import kernel_options
from acm_compiler.codegen.gpu.spec import DTYPES
from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.codegen.gpu.start import Launcher, blocks_in
from acm_compiler.codegen.gpu.tiles import bucket_of
from acm_compiler.planning.decisions import PlannedSite

WIDEST = 256
"""Columns of the gate's first product that one program holds; wider gates are not for this kernel."""
_NARROWEST = 16  # of a matrix product
_LARGE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """One gate as its kernel sees it: dtype of the tokens and of the gate itself, sizes, rule; norm: tokens are
    normalised first.
    """

    d_in: int
    width: int
    columns: int
    k_min: int
    rule: str
    dtype: str
    gate_dtype: str
    norm: bool


@triton.jit
def _moments(x_at, shift, steps, D_IN, eps, BK: tl.constexpr):
    """Mean, as a distance from `shift`, and one over the deviation of rows, merged block by block; fp32."""
    mean = tl.zeros_like(shift)
    squares = tl.zeros_like(shift)
    for k in range(0, D_IN, BK):
        here = (k + steps < D_IN)[None, :]
        off = tl.where(here, tl.load(x_at + k, mask=here, other=0.0).to(tl.float32) - shift[:, None], 0.0)
        count = tl.minimum(D_IN - k, BK) * 1.0
        part = tl.sum(off, 1) / count
        off = tl.where(here, off - part[:, None], 0.0)
        further = part - mean
        squares += tl.sum(off * off, 1) + further * further * (k * count / (k + count))
        mean += further * (count / (k + count))
    return mean, tl.rsqrt(squares / D_IN + tl.cast(eps, tl.float32))


@triton.jit
def _normalised(a, shift, mean, scale, weight, bias, columns, D_IN):
    """A block of rows, normalised and rounded to their type."""
    y = (a.to(tl.float32) - shift[:, None] - mean[:, None]) * scale[:, None]
    if weight is not None:
        y *= tl.load(weight + columns, mask=columns < D_IN, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        y += tl.load(bias + columns, mask=columns < D_IN, other=0.0).to(tl.float32)[None, :]
    return y.to(a.dtype)


@triton.jit
def _utility(score, k, knob, cost, RULE: tl.constexpr):
    """The utility of every choice, as the reference's `utilities` has it."""
    price = k.to(tl.float32) * tl.cast(cost, tl.float32)  # Inductor gives numbers in fp64
    if RULE == "damage":
        other = knob + tl.log(price)
        apart = tl.where(score == other, 0.0, tl.abs(score - other))  # of two infinities, too
        return -(tl.maximum(score, other) + tl.log(1.0 + tl.exp(-apart)))
    else:
        tl.static_assert(RULE == "logits", "a rule that no kernel knows")
        return score - knob * price


@triton.jit
def _best(u, choice, k_lo, k_hi, K_MIN: tl.constexpr, C: tl.constexpr):
    """The best k of every row, as the reference's `choose_k` has it.

    No NaN reaches the argmax, which would be free to give a column that is padding, and what it gives is
    clamped: a k beyond the last would read weights that are not there.
    """
    most = tl.minimum(tl.maximum(k_hi, K_MIN), K_MIN + C - 1)
    least = tl.minimum(tl.maximum(k_lo, K_MIN), most)
    allowed = ((choice >= least) & (choice <= most))[None, :]
    lost = tl.max((allowed & (u != u)).to(tl.int32), 1) > 0
    best = tl.argmax(tl.where(allowed & (u == u), u, float("-inf")), 1).to(tl.int32) + K_MIN
    return tl.where(lost, most, tl.minimum(tl.maximum(best, least), most))


@triton.jit(do_not_specialize=["T", "cost", "eps"], do_not_specialize_on_alignment=["knob", "k_lo", "k_hi"])
def gate_kernel(
    k_out, x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, norm_weight, norm_bias, T, D_IN, stride_x, cost,
    eps, G: tl.constexpr, C: tl.constexpr, K_MIN: tl.constexpr, RULE: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, GP: tl.constexpr, CP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """k_out [T]; w_inner [G, D_IN], w_outer [C, G]; knob fp32, k_lo and k_hi int32 scalars in memory.

    NORM: x is read twice, the second time from a cache.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inner = tl.arange(0, GP)
    outer = tl.arange(0, CP)
    steps = tl.arange(0, BK)
    x_at = x + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * stride_x + steps[None, :]
    w_at = w_inner + tl.minimum(inner, G - 1)[None, :] * D_IN + steps[:, None]
    if NORM:
        shift = tl.load(x + tl.minimum(rows, T - 1).to(tl.int64) * stride_x).to(tl.float32)
        mean, scale = _moments(x_at, shift, steps, D_IN, eps, BK)
    acc = tl.zeros((BM, GP), tl.float32)
    for k in range(0, D_IN, BK):
        if EVEN:
            a = tl.load(x_at + k)
            b = tl.load(w_at + k)
        else:
            a = tl.load(x_at + k, mask=(k + steps < D_IN)[None, :], other=0.0)
            b = tl.load(w_at + k, mask=(k + steps < D_IN)[:, None], other=0.0)
        if NORM:
            a = _normalised(a, shift, mean, scale, norm_weight, norm_bias, k + steps, D_IN)
        if INTERPRET:  # the interpreter's dot takes bf16 for its bit pattern
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
    acc += tl.load(b_inner + inner, mask=inner < G, other=0.0).to(tl.float32)[None, :]
    h = gelu(acc, False, INTERPRET)
    real = (inner < G)[:, None] & (outer < C)[None, :]
    w = tl.load(w_outer + outer[None, :] * G + inner[:, None], mask=real, other=0.0)
    score = tl.dot(h, w.to(tl.float32), input_precision="ieee")
    score += tl.load(b_outer + outer, mask=outer < C, other=0.0).to(tl.float32)[None, :]
    choice = outer + K_MIN
    u = _utility(score, choice[None, :], tl.load(knob), cost, RULE)
    tl.store(k_out + rows, _best(u, choice, tl.load(k_lo), tl.load(k_hi), K_MIN, C), mask=rows < T)


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
    exact = "fp32" in (spec.dtype, spec.gate_dtype)
    step = 64 // (2 if exact else 1) // (2 if width > _LARGE else 1)
    # products of three parts and of normalised blocks take 32 rows: they stay off wgmma, whose register operands old
    # ptxas gets wrong
    rows = 32 if exact or spec.norm or width > _LARGE // 2 else 64
    return {
        "G": spec.width,
        "C": spec.columns,
        "K_MIN": spec.k_min,
        "RULE": spec.rule,
        "EVEN": spec.d_in % step == 0,
        "NORM": spec.norm,
        "PRECISION": "tf32x3",
        "INTERPRET": interpret,
        "GP": width,
        "CP": max(_NARROWEST, triton.next_power_of_2(spec.columns)),
        "BM": min(rows, max(_NARROWEST, triton.next_power_of_2(tokens))),
        "BK": step,
    }


def gate_options(machine: Machine, constants: dict[str, Any]) -> dict[str, int]:
    """Warps and pipeline stages (see Machine for `fenced`)."""
    unsafe = machine.bulk_copies and not machine.fenced and constants["BM"] >= 64
    return kernel_options(warps=4, stages=1 if unsafe else 3)


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
    return plan(x_TD, call.knob, call.k_lo, call.k_hi)


class GatePlan:
    """The launch of one gate for calls like `call`, with as many tokens as its bucket has."""

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
        weights = GateWeights(*(tensor.contiguous() for tensor in part(GateWeights, call)))
        spec = GateSpec(
            d_in=call.x.shape[1],
            width=weights.w_inner.shape[0],
            columns=weights.w_outer.shape[0],
            k_min=k_min,
            rule=rule,
            dtype=DTYPES[call.x.dtype],
            gate_dtype=DTYPES[weights.w_inner.dtype],
            norm=norm is not None,
        )
        bucket = bucket_of(call.x.shape[0] if tokens is None else tokens)
        constants = gate_constants(spec, 1 << bucket, interpret=INTERPRETED)
        affine = (None, None) if norm is None else (norm.weight, norm.bias)
        self._weights, self._d_in, self._rows = weights, spec.d_in, constants["BM"]
        self._norm = tuple(None if tensor is None else tensor.contiguous() for tensor in affine)
        self._numbers = cost, 0.0 if norm is None else norm.eps
        self._start = Launcher(gate_kernel, constants, gate_options(machine, constants))

    def __call__(self, x_TD: Tensor, knob: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        """k [T] of T >= 1 tokens, whose rows are contiguous."""
        tokens = x_TD.shape[0]
        k_T = x_TD.new_empty(tokens, dtype=torch.int32)
        programs, stride = blocks_in(tokens, self._rows), x_TD.stride(0)
        bounds = knob, k_lo, k_hi
        self._start(
            programs, k_T, x_TD, *self._weights, *bounds, *self._norm, tokens, self._d_in, stride, *self._numbers
        )
        return k_T
