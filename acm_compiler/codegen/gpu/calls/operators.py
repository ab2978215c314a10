"""`acm::learners`, `acm::gate` and `acm::gated_learners` on CUDA devices.

A call finds the plan of its module and of its kind, which was made and checked when such a call came first; else it is
checked and gets one, or goes to the reference, with a reason.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import (
    GateArguments,
    GatedArguments,
    GateWeights,
    LearnersArguments,
    LearnerWeights,
    part,
)
from acm_compiler.acm.gated_learners import gate_call, run_apart
from acm_compiler.acm.operands import require_gate, require_gated, require_learners
from acm_compiler.acm.ops import GATE_REFERENCE, LIBRARY, REFERENCE
from acm_compiler.acm.reference import Norm, Weights
from acm_compiler.codegen import gpu
from acm_compiler.codegen.compare import require_equal
from acm_compiler.codegen.gpu.calls.kept import find_plan, keep_plan, kind_of_k, kind_of_rows, rounding
from acm_compiler.codegen.gpu.gate_plan import Choice, GatePlan
from acm_compiler.codegen.gpu.launch import Plan, plan_of
from acm_compiler.codegen.gpu.products import by_rows
from acm_compiler.codegen.gpu.spec import spec_of

_WEIGHTS = len(LearnerWeights._fields)


def register(*, checked: bool) -> None:
    """Make these the implementations on CUDA devices. checked: outputs are compared with the reference's."""
    torch.library.impl("acm::learners", "CUDA", _checked if checked else learners, lib=LIBRARY)
    torch.library.impl("acm::gate", "CUDA", gate, lib=LIBRARY)
    if not checked:
        torch.library.impl("acm::gated_learners", "CUDA", gated_learners, lib=LIBRARY)


def learners(x: Tensor, k: Tensor, *tensors: Any, form: str, act: str) -> Tensor:
    """Run the operator; where no kernel fits, the reference, logged once."""
    weights, residual = tensors[:_WEIGHTS], tensors[_WEIGHTS] if len(tensors) > _WEIGHTS else None
    kind = learners_kind(x, k, residual, form, act)
    plan = None if kind is None else find_plan(weights, kind)
    if plan is None:
        return _learners_first(LearnersArguments(x, k, *tensors), form, act, kind)
    with on_device_of(x):
        return plan(x, k, residual)


def _learners_first(call: LearnersArguments, form: str, act: str, kind: Hashable) -> Tensor:
    """The first call of a kind, checked; its plan is kept once its kernels have been started."""
    require_learners(call, form=form)
    x, shape = call.x, call.w_in.shape
    machine = gpu.machine_of(x.device)
    reason = gpu.not_covered(
        form=form, act=act, dtype=x.dtype, shape=shape, arch=machine.arch, is_quantized=call.s_in is not None
    )
    if reason is None:
        weights = Weights(*part(LearnerWeights, call), act=act, form=form)
        with on_device_of(x), gpu.unless_unbuilt((form, act, x.dtype, shape)):  # kernels start on that device
            return _start_first(call, weights, None, kind=kind, kept_by=weights.tensors, machine=machine)
        reason = gpu.UNBUILT[form, act, x.dtype, shape]
    gpu.say_once(reason)
    return REFERENCE(*call, form=form, act=act)


def _start_first(
    call: LearnersArguments,
    weights: Weights,
    norm: Norm | None,
    *,
    kind: Hashable,
    kept_by: tuple[Tensor | None, ...],
    machine: gpu.Machine,
) -> Tensor:
    x, residual = by_rows(call.x), None if call.residual is None else by_rows(call.residual)
    if not x.shape[0]:
        return x.new_empty(0, weights.b_out.shape[1])
    spec = spec_of(x, weights, residual, norm=norm)
    plan: Plan = plan_of(spec, aliases_of(weights), _aliases_of_norm(norm), machine, x.shape[0])
    y = plan(x, call.k.contiguous(), residual)
    if kind is not None:
        keep_plan(kept_by, kind, plan)
    return y


def learners_kind(
    x: Tensor, k: Tensor | None, residual: Tensor | None, *facts: Hashable, bucket: int | None = None
) -> Hashable:
    """The kind of a call, None where no plan is kept: all that plan and checks depend on, but for the weights.

    bucket: another one than that of the rows.
    """
    rows = kind_of_rows(x, bucket)
    if rows is None:
        return None
    tokens, of_k, beside = x.shape[0], None, None
    if k is not None and (of_k := kind_of_k(k, tokens)) is None:
        return None
    if residual is not None:
        beside = kind_of_rows(residual)
        if beside is None or residual.shape[0] != tokens:
            return None
    return rows, of_k, beside, rounding(x.dtype), facts


def gate(x: Tensor, *tensors: Tensor, cost: float, k_min: int, rule: str) -> Tensor:
    """The gate's operator: k of every token."""
    weights, scalars = tensors[:4], tensors[4:]
    kind = gate_kind(x, scalars, cost=cost, k_min=k_min, rule=rule)
    plan = None if kind is None else find_plan(weights, kind)
    if plan is None:
        return _gate_first(GateArguments(x, *tensors), kind, cost=cost, k_min=k_min, rule=rule)
    with on_device_of(x):
        return plan(x, *scalars).k


def _gate_first(call: GateArguments, kind: Hashable, **choices: Any) -> Tensor:
    require_gate(call, k_min=choices["k_min"], rule=choices["rule"])
    machine, w_inner = gpu.machine_of(call.x.device), call.w_inner
    dtypes, width = (call.x.dtype, w_inner.dtype), w_inner.shape[0]
    reason = gpu.gate_not_covered(dtypes, width=width, arch=machine.arch)
    if reason is None:
        with on_device_of(call.x), gpu.unless_unbuilt((dtypes, width)):
            return _start_gate_first(call, None, kind=kind, kept_by=call[1:5], machine=machine, **choices).k
        reason = gpu.UNBUILT[dtypes, width]
    gpu.say_once(reason)
    return GATE_REFERENCE(*call, **choices)


def _start_gate_first(
    call: GateArguments,
    norm: Norm | None,
    *,
    kind: Hashable,
    kept_by: tuple[Tensor | None, ...],
    machine: gpu.Machine,
    **choices: Any,
) -> Choice:
    if not call.x.shape[0]:
        return Choice(call.x.new_empty(0, dtype=torch.int32), None)
    call = call._replace(x=by_rows(call.x))
    plan = GatePlan(aliases_of_gate(call), machine=machine, norm=_aliases_of_norm(norm), **choices)
    choice = plan(call.x, call.knob, call.k_lo, call.k_hi)
    if kind is not None:
        keep_plan(kept_by, kind, plan)
    return choice


def gate_kind(
    x: Tensor,
    scalars: tuple[Tensor, ...],
    *facts: Hashable,
    cost: float,
    k_min: int,
    rule: str,
    bucket: int | None = None,
) -> Hashable:
    """The same of a gate's call; facts: of the norm in front, if there is one."""
    rows = kind_of_rows(x, bucket)
    if rows is None:
        return None
    knob, k_lo, k_hi = scalars
    return rows, knob.dtype, knob.ndim, k_lo.dtype, k_lo.ndim, k_hi.dtype, k_hi.ndim, cost, k_min, rule, facts


def gated_learners(
    *tensors: Any, norm_eps: float | None = None, norm_centred: bool = True, form: str, act: str, **choices: Any
) -> Tensor:
    """The operator that is gate and learners, and perhaps the norm in front of them: then rows are normalised where
    kernels first read them.
    """
    if norm_eps is None:
        return run_apart(*tensors, norm_eps=None, form=form, act=act, **choices)
    call = GatedArguments(*tensors)
    norm = Norm(weight=call.norm_weight, bias=call.norm_bias, eps=norm_eps, centred=norm_centred)
    affine = norm.weight, norm.bias
    gate_weights, weights = (*call[1:5], *affine), (*part(LearnerWeights, call), *affine)
    facts = norm_eps, norm_centred, *(None if tensor is None else tensor.dtype for tensor in affine)
    gate_operands = gate_call(call, call.x)
    scalars = gate_operands[5:]
    of_gate = gate_kind(call.x, scalars, *facts, **choices)
    kind = learners_kind(call.x, None, call.residual, form, act, *facts)
    plans = (find_plan(gate_weights, of_gate), find_plan(weights, kind))
    if None not in (of_gate, kind, *plans):
        with on_device_of(call.x):
            choice = plans[0](call.x, *scalars)
            return plans[1](call.x, choice.k, call.residual, plans[1].order(*choice, call.x))
    require_gated(call, form=form, k_min=choices["k_min"], rule=choices["rule"], norm_eps=norm_eps)
    if _normed_is_covered(call, form, act):
        kept = {"machine": gpu.machine_of(call.x.device)}
        with (
            on_device_of(call.x),
            gpu.unless_unbuilt(normed_kind(call, form, act)),
        ):  # each kernel normalises as it reads x
            choice = _start_gate_first(gate_operands, norm, kind=of_gate, kept_by=gate_weights, **kept, **choices)
            apart = LearnersArguments(call.x, choice.k, *part(LearnerWeights, call), call.residual)
            of = Weights(*part(LearnerWeights, call), act=act, form=form)
            return _start_first(apart, of, norm, kind=kind, kept_by=weights, **kept)
    return run_apart(*tensors, norm_eps=norm_eps, norm_centred=norm_centred, form=form, act=act, **choices)


def normed_kind(call: GatedArguments, form: str, act: str) -> Hashable:
    """The kind of calls with a norm that cannot be built together."""
    return "norm", form, act, call.x.dtype, call.w_in.shape, call.w_inner.shape


def _normed_is_covered(call: GatedArguments, form: str, act: str) -> bool:
    x, w_inner = call.x, call.w_inner
    arch = gpu.machine_of(x.device).arch
    if gpu.gate_not_covered((x.dtype, w_inner.dtype), width=w_inner.shape[0], arch=arch):
        return False
    is_quantized, shape = call.s_in is not None, call.w_in.shape
    if gpu.not_covered(form=form, act=act, dtype=x.dtype, shape=shape, arch=arch, is_quantized=is_quantized):
        return False
    return normed_kind(call, form, act) not in gpu.UNBUILT


def aliases_of(weights: Weights) -> Weights:
    """The same memory by other tensors: a plan that held the weights themselves would keep their owner from going."""
    tensors: Any = map(_alias, weights.tensors)
    return Weights(*tensors, act=weights.act, form=weights.form)


def aliases_of_gate(call: GateArguments) -> GateArguments:
    """The same for the weights of a gate."""
    return call._replace(**{name: getattr(call, name).detach() for name in GateWeights._fields})


def _aliases_of_norm(norm: Norm | None) -> Norm | None:
    return None if norm is None else replace(norm, weight=_alias(norm.weight), bias=_alias(norm.bias))


def _alias(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Kernels start on the device of x."""
    return _HERE if torch.cuda.current_device() == x.get_device() else torch.cuda.device(x.device)


_HERE = nullcontext()


def _checked(x: Tensor, k: Tensor, w_in: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    """The kernels' output after it was compared with the reference's (ACM_CHECK=1)."""
    y = learners(x, k, w_in, *tensors, form=form, act=act)
    require_equal(y, REFERENCE(x, k, w_in, *tensors, form=form, act=act), w_in)
    return y
