"""`acm::learners`, `acm::gate` and `acm::gated_learners` on CUDA devices.

A call finds the plan of its module and of its kind, which was made and checked when such a call came first; else it is
checked and gets one, or goes to the reference, with a reason.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import (
    GateArguments,
    GatedArguments,
    GateWeights,
    LearnersArguments,
    LearnerWeights,
    Weights,
    part,
)
from acm_compiler.acm.check_arguments import require_gate, require_learners
from acm_compiler.acm.gated_learners import gate_call, run_apart
from acm_compiler.acm.ops import GATE_REFERENCE, LIBRARY, REFERENCE
from acm_compiler.codegen import gpu
from acm_compiler.codegen.compare import checked
from acm_compiler.codegen.gpu.calls.kept import find_plan, keep_plan, kind_of_k, kind_of_rows, rounding
from acm_compiler.codegen.gpu.gate_plan import GatePlan
from acm_compiler.codegen.gpu.launch import Plan, plan_of
from acm_compiler.codegen.gpu.products import by_rows
from acm_compiler.codegen.gpu.spec import spec_of

_WEIGHTS = len(LearnerWeights._fields)


def register(*, check: bool) -> None:
    """Make these the implementations on CUDA devices. check: outputs are compared with the reference's."""
    torch.library.impl("acm::learners", "CUDA", checked(learners) if check else learners, lib=LIBRARY)
    torch.library.impl("acm::gate", "CUDA", gate, lib=LIBRARY)
    if not check:
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
        weights = Weights.of(call, form=form, act=act)
        with on_device_of(x), gpu.unless_unbuilt((form, act, x.dtype, shape)):  # kernels start on that device
            return _start_first(call, weights, kind=kind, machine=machine)
        reason = gpu.UNBUILT[form, act, x.dtype, shape]
    gpu.say_once(reason)
    return REFERENCE(*call, form=form, act=act)


def _start_first(call: LearnersArguments, weights: Weights, *, kind: Hashable, machine: gpu.Machine) -> Tensor:
    x, residual = by_rows(call.x), None if call.residual is None else by_rows(call.residual)
    if not x.shape[0]:
        return x.new_empty(0, weights.b_out.shape[1])
    plan: Plan = plan_of(spec_of(x, weights, residual), aliases_of(weights), machine, x.shape[0])
    y = plan(x, call.k.contiguous(), residual)
    if kind is not None:
        keep_plan(weights.tensors, kind, plan)
    return y


def learners_kind(
    x: Tensor, k: Tensor | None, residual: Tensor | None, *facts: Hashable, bucket: int | None = None
) -> Hashable:
    """The kind of a call, None where no plan is kept: all that plan and checks depend on, but for the weights.

    k: None for one as a gate gives it. bucket: another one than that of the rows.
    """
    rows = kind_of_rows(x, bucket)
    if rows is None:
        return None
    tokens, beside = x.shape[0], None
    of_k = (torch.int32, x.get_device(), 0) if k is None else kind_of_k(k, tokens)
    if of_k is None:
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
            return _start_gate_first(call, kind=kind, machine=machine, **choices)
        reason = gpu.UNBUILT[dtypes, width]
    gpu.say_once(reason)
    return GATE_REFERENCE(*call, **choices)


def _start_gate_first(call: GateArguments, *, kind: Hashable, machine: gpu.Machine, **choices: Any) -> Tensor:
    if not call.x.shape[0]:
        return call.x.new_empty(0, dtype=torch.int32)
    call = call._replace(x=by_rows(call.x))
    plan = GatePlan(aliases_of_gate(call), machine=machine, **choices)
    choice = plan(call.x, call.knob, call.k_lo, call.k_hi)
    if kind is not None:
        keep_plan(call[1:5], kind, plan)
    return choice.k


def gate_kind(
    x: Tensor,
    scalars: tuple[Tensor, ...],
    *,
    cost: float,
    k_min: int,
    rule: str,
    bucket: int | None = None,
) -> Hashable:
    """The same of a gate's call."""
    rows = kind_of_rows(x, bucket)
    if rows is None:
        return None
    knob, k_lo, k_hi = scalars
    return rows, knob.dtype, knob.ndim, k_lo.dtype, k_lo.ndim, k_hi.dtype, k_hi.ndim, cost, k_min, rule


def gated_learners(
    *tensors: Any, form: str, act: str, norm_eps: float | None = None, norm_centred: bool = True, **choices: Any
) -> Tensor:
    """The operator that is gate and learners: by the kept plans of both, the gate's histogram handed on to the sort.

    A first call of a kind, whose operators then keep plans, and calls with a norm run apart.
    """
    call = GatedArguments(*tensors)
    if norm_eps is call.norm_weight is call.norm_bias is None:
        of_gate = gate_call(call, call.x)
        scalars, weights = of_gate[5:], part(LearnerWeights, call)
        gate_plan = find_plan(of_gate[1:5], gate_kind(call.x, scalars, **choices))
        plan = find_plan(weights, learners_kind(call.x, None, call.residual, form, act))
        if gate_plan is not None and plan is not None:
            with on_device_of(call.x):
                choice = gate_plan(call.x, *scalars)
                return plan(call.x, choice.k, call.residual, plan.order(*choice, call.x))
    return run_apart(*tensors, form=form, act=act, norm_eps=norm_eps, norm_centred=norm_centred, **choices)


def aliases_of(weights: Weights) -> Weights:
    """The same memory by other tensors: a plan that held the weights themselves would keep their owner from going."""
    return weights.map(Tensor.detach)


def aliases_of_gate(call: GateArguments) -> GateArguments:
    """The same for the weights of a gate."""
    return call._replace(**{name: getattr(call, name).detach() for name in GateWeights._fields})


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Kernels start on the device of x."""
    return _HERE if torch.cuda.current_device() == x.get_device() else torch.cuda.device(x.device)


_HERE = nullcontext()
