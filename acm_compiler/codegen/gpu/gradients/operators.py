"""`acm::learners_backward` and `acm::relaxed_backward` on CUDA devices; elsewhere, and where no kernel fits, torch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import LearnersArguments, Weights
from acm_compiler.acm.check_arguments import require_learners
from acm_compiler.acm.gradients import operators as plain
from acm_compiler.acm.gradients.sorted_tokens import chosen
from acm_compiler.acm.ops import LIBRARY
from acm_compiler.codegen import gpu
from acm_compiler.codegen.gpu.calls.operators import on_device_of
from acm_compiler.codegen.gpu.dispatch import Order
from acm_compiler.codegen.gpu.gradients.launch import run_backward
from acm_compiler.codegen.gpu.products import Kept


def register() -> None:
    """Make these the implementations on CUDA devices."""
    torch.library.impl("acm::learners_backward", "CUDA", learners_backward, lib=LIBRARY)
    torch.library.impl("acm::relaxed_backward", "CUDA", relaxed_backward, lib=LIBRARY)


def learners_backward(dy: Tensor, x: Tensor, k: Tensor, *tensors: Any, form: str, act: str) -> list[Tensor]:
    """Gradients of x and of all weights that have one, in their order."""
    call = LearnersArguments(x, k, *tensors)
    require_learners(call, form=form)
    names = ["x", *plain.learned(call)]
    found = kernels_gradients(dy, x, k, Weights.of(call, form=form, act=act), set(names))
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
    found = kernels_gradients(dy, x, chosen(nu, k_min), weights, set(wanted), choice=(nu.dtype, k_min))
    if found is None:
        return plain.relaxed_backward(dy, a, up, x, nu, *tensors, k_min=k_min, form=form, act=act, wanted=wanted)
    return [plain.own(found[name], dy) for name in wanted]


def kernels_gradients(
    dy: Tensor,
    x: Tensor,
    k: Tensor,
    weights: Weights,
    wanted: set[str],
    *,
    choice: tuple[torch.dtype, int] | None = None,
    order: Order | None = None,
    kept: Kept | None = None,
) -> dict[str, Tensor] | None:
    """Gradients by the kernels, as `run_backward` gives them; None where they do not cover the call."""
    reason, kind = reason_against(x, weights), kind_of(x, weights)
    if reason is None:
        with on_device_of(x), gpu.unless_unbuilt(kind):
            machine = gpu.machine_of(x.device)
            facts: dict[str, Any] = {"machine": machine, "choice": choice, "order": order, "kept": kept}
            return run_backward(dy, x, k, weights, wanted=wanted, **facts)
        reason = gpu.UNBUILT[kind]
    if reason:
        gpu.say_once(reason)
    return None


def kind_of(x: Tensor, weights: Weights) -> Hashable:
    """The kind of backwards that cannot be built together."""
    return "backward", weights.form, weights.act, x.dtype, weights.w_in.shape


def reason_against(x: Tensor, weights: Weights) -> str | None:
    """Reason why such a backward is plain torch, None when the kernels run it; empty where that goes without saying."""
    if not weights.is_nested or x.shape[0] == 0:
        return ""
    facts: dict[str, Any] = {"form": weights.form, "act": weights.act, "dtype": x.dtype, "shape": weights.w_in.shape}
    lacking = gpu.not_covered(**facts, arch=gpu.machine_of(x.device).arch, is_quantized=weights.is_quantized)
    return lacking or gpu.UNBUILT.get(kind_of(x, weights))
