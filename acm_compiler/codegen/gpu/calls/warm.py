"""Build the kernels of ACMs, for any number of tokens, before the first call: into the plans that calls then find."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from acm_compiler.acm import ACM
from acm_compiler.acm.arguments import GateArguments
from acm_compiler.codegen import gpu
from acm_compiler.codegen.gpu.calls.kept import find_plan, keep_plan
from acm_compiler.codegen.gpu.calls.operators import aliases_of, aliases_of_gate, gate_kind, learners_kind, on_device_of
from acm_compiler.codegen.gpu.gate_plan import GatePlan
from acm_compiler.codegen.gpu.launch import plan_of
from acm_compiler.codegen.gpu.spec import spec_of
from acm_compiler.codegen.gpu.start import building
from acm_compiler.codegen.gpu.tiles import buckets


def warm_up(acms: Iterable[ACM]) -> int:
    """Build the kernels of eager calls of these ACMs, in the type of their weights; the number of plans made.

    For inputs whose rows are contiguous and begin where bulk copies may. What the kernels do not cover is left out.
    """
    return sum(_warm_learners(acm) + _warm_gate(acm) for acm in acms)


def _warm_learners(acm: ACM) -> int:
    weights, made = acm.learners.weights(), 0
    x_TD = _row(acm)
    k_T = x_TD.new_empty(1, dtype=torch.int32)
    machine, shape = gpu.machine_of(x_TD.device), weights.w_in.shape
    facts: dict[str, Any] = {"form": weights.form, "act": weights.act, "dtype": x_TD.dtype, "shape": shape}
    for bucket in buckets():
        if gpu.not_covered(**facts, arch=machine.arch, is_quantized=weights.is_quantized) is not None:
            return made
        kind = learners_kind(x_TD, k_T, None, weights.form, weights.act, bucket=bucket)
        if find_plan(weights.tensors, kind) is not None:
            continue
        with on_device_of(x_TD), building(), gpu.unless_unbuilt(tuple(facts.values())):
            plan = plan_of(spec_of(x_TD, weights, None), aliases_of(weights), machine, 1 << bucket)
            plan(x_TD, k_T, None)
            keep_plan(weights.tensors, kind, plan)
            made += 1
    return made


def _warm_gate(acm: ACM) -> int:
    gate, made = acm.gate, 0
    x_TD = _row(acm)
    choices: dict[str, Any] = {"cost": acm.cost, "k_min": acm.k_min, "rule": acm.gate.rule}
    scalars = acm.knob.view(torch.float32), acm.k_lo, acm.k_hi
    call, machine = GateArguments(x_TD, *gate.weights(), *scalars), gpu.machine_of(x_TD.device)
    dtypes, width = (x_TD.dtype, call.w_inner.dtype), call.w_inner.shape[0]
    for bucket in buckets():
        if gpu.gate_not_covered(dtypes, width=width, arch=machine.arch) is not None:
            return made
        kind = gate_kind(x_TD, scalars, **choices, bucket=bucket)
        if find_plan(call[1:5], kind) is not None:
            continue
        with on_device_of(x_TD), building(), gpu.unless_unbuilt((dtypes, width)):
            plan = GatePlan(aliases_of_gate(call), **choices, machine=machine, tokens=1 << bucket)
            plan(x_TD, *scalars)
            keep_plan(call[1:5], kind, plan)
            made += 1
    return made


def _row(acm: ACM) -> torch.Tensor:
    b_out = acm.learners.b_out
    return torch.empty(1, acm.d_in, dtype=b_out.dtype, device=b_out.device)
