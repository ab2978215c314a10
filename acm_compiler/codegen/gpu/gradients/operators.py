"""`acm::learners_backward` and `acm::relaxed_backward` on CUDA devices; elsewhere, and where no kernel fits, torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import LearnersArguments, LearnerWeights, part
from acm_compiler.acm.gradients import operators as plain
from acm_compiler.acm.gradients.sorted_tokens import chosen
from acm_compiler.acm.operands import require_learners
from acm_compiler.acm.ops import LIBRARY
from acm_compiler.acm.reference import Weights
from acm_compiler.codegen import gpu
from acm_compiler.codegen.gpu.calls.operators import on_device_of
from acm_compiler.codegen.gpu.gradients.launch import run_backward


def register() -> None:
    """Make these the implementations on CUDA devices."""
    torch.library.impl("acm::learners_backward", "CUDA", learners_backward, lib=LIBRARY)
    torch.library.impl("acm::relaxed_backward", "CUDA", relaxed_backward, lib=LIBRARY)


def learners_backward(dy: Tensor, x: Tensor, k: Tensor, *tensors: Any, form: str, act: str) -> list[Tensor]:
    """Gradients of x and of all weights that have one, in their order."""
    call = LearnersArguments(x, k, *tensors)
    require_learners(call, form=form)
    names = ["x", *plain.learned(call)]
    found = _run(dy, x, k, Weights(*part(LearnerWeights, call), act=act, form=form), set(names))
    if found is None:
        return plain.backward(dy, x, k, *tensors, form=form, act=act)
    found["residual"] = dy
    return [plain.own(found[name], dy) for name in names]


def relaxed_backward(
    dy: Tensor,
    a: Tensor,
    up: Tensor,
    x: Tensor,
    nu: Tensor,
    *tensors: Any,
    k_min: int,
    form: str,
    act: str,
    wanted: list[str],
) -> list[Tensor]:
    """The wanted gradients of a relaxed choice, in their order."""
    weights = Weights(*tensors, act=act, form=form)
    found = _run(dy, x, chosen(nu, k_min), weights, set(wanted), choice=(nu.dtype, k_min))
    if found is None:
        return plain.relaxed_backward(dy, a, up, x, nu, *tensors, k_min=k_min, form=form, act=act, wanted=wanted)
    return [plain.own(found[name], dy) for name in wanted]


def _run(
    dy: Tensor,
    x: Tensor,
    k: Tensor,
    weights: Weights,
    wanted: set[str],
    choice: tuple[torch.dtype, int] | None = None,
) -> dict[str, Tensor] | None:
    """Gradients by the kernels, None where they do not cover the call."""
    machine, shape, form, act = gpu.machine_of(x.device), weights.w_in.shape, weights.form, weights.act
    kind = "backward", form, act, x.dtype, shape
    lacking = gpu.not_covered(
        form=form, act=act, dtype=x.dtype, shape=shape, arch=machine.arch, is_quantized=weights.is_quantized
    )
    reason = lacking or gpu.UNBUILT.get(kind)
    if reason is None and weights.is_nested and x.shape[0]:
        with on_device_of(x), gpu.unless_unbuilt(kind):
            return run_backward(dy, x, k, weights, wanted=wanted, machine=machine, choice=choice)
        reason = gpu.UNBUILT[kind]
    if reason is not None:
        gpu.say_once(reason)
    return None
