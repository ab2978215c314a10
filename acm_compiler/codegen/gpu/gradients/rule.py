"""The autograd function of eager calls: kernels forward and backward, without going through the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import LearnerWeights, Weights
from acm_compiler.acm.gradients import operators as plain
from acm_compiler.acm.gradients.sorted_tokens import chosen
from acm_compiler.acm.ops import DIFFERENTIATED, Differentiated
from acm_compiler.acm.reference import relaxed_output, run_learners
from acm_compiler.codegen.gpu.calls import operators
from acm_compiler.codegen.gpu.dispatch import Order
from acm_compiler.codegen.gpu.gradients.operators import kernels_gradients
from acm_compiler.codegen.gpu.launch import Plan
from acm_compiler.codegen.gpu.products import Kept

_BEFORE = 5  # arguments of the rule before its tensors
_SAVED = 2 + len(LearnerWeights._fields)  # x, the choice, and weights


def register() -> None:
    """Make these the way of eager calls with gradients on CUDA devices."""
    DIFFERENTIATED["cuda"] = Differentiated(learners, relaxed)


def learners(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """y [T, O] of learners that are not quantised, for a k per token."""
    return _Rule.apply(_whole_call(weights), None, None, weights.form, weights.act, x_TD, k_T, *weights.tensors)


def relaxed(x_TD: Tensor, nu_TC: Tensor, weights: Weights, k_min: int) -> Tensor:
    """The same for a relaxed choice, one-hot in value."""
    return _Rule.apply(_whole_call(weights), None, k_min, weights.form, weights.act, x_TD, nu_TC, *weights.tensors)


def differentiated(plan: Plan, order: Order | None, x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """The learners by a kept plan; order: what it gave of k, which the backward reads again."""
    return _Rule.apply(plan, order, None, weights.form, weights.act, x_TD, k_T, *weights.tensors)


def _whole_call(weights: Weights) -> Callable[..., Tensor]:
    """A call as the operator runs it, which finds its plan or makes one."""
    facts = {"form": weights.form, "act": weights.act}
    return lambda x_TD, k_T, residual, order: operators.learners(x_TD, k_T, *weights.tensors, residual, **facts)


class _Rule(torch.autograd.Function):
    """y [T, O]. choice: k, or nu with a k_min. Kept are inputs, and of plans that sort also order and first layer."""

    @staticmethod
    def forward(ctx, run, order, k_min, form, act, x_TD, choice, *tensors):  # type: ignore[override]
        kept: Kept | None = None
        if order is None:
            y = run(x_TD, choice if k_min is None else chosen(choice, k_min), None, order)
        else:
            y, kept = run.keeping(x_TD, choice, order)
        ctx.save_for_backward(x_TD, choice, *tensors, *(order or ())[:2], *(kept or ()))
        ctx.is_sorted, ctx.keeps = order is not None, kept is not None
        ctx.k_min, ctx.facts = k_min, {"form": form, "act": act}
        return y

    @staticmethod
    def backward(ctx, dy_TO):  # type: ignore[override]
        saved, k_min, wants = ctx.saved_tensors, ctx.k_min, ctx.needs_input_grad[_BEFORE:]
        saved, more = saved[:_SAVED], saved[_SAVED:]
        order, kept = Order(*more[:2]) if ctx.is_sorted else None, Kept(*more[2:]) if ctx.keeps else None
        x_TD, choice, *tensors = saved
        weights = Weights(*tensors, **ctx.facts)
        names = "x", "k" if k_min is None else "nu", *LearnerWeights._fields
        found: Mapping[str, Tensor | None]
        if torch.is_grad_enabled():  # these gradients are to be differentiated
            y = run_learners(x_TD, choice, weights) if k_min is None else relaxed_output(x_TD, choice, weights, k_min)
            found = plain.differentiable(y, dict(zip(names, saved, strict=True)), wants, dy_TO)
        else:
            wanted = [name for name, wants_it in zip(names, wants, strict=True) if wants_it]
            found = _gradients(dy_TO, x_TD, choice, weights, wanted, k_min, order, kept)
        return *(None,) * _BEFORE, *(found.get(name) for name in names)


def _gradients(
    dy: Tensor,
    x: Tensor,
    choice: Tensor,
    weights: Weights,
    wanted: list[str],
    k_min: int | None,
    order: Order | None,
    kept: Kept | None,
) -> dict[str, Tensor]:
    """The wanted gradients by name: of the kernels, or, where they do not cover the call, in plain torch."""
    facts: dict[str, Any] = {"form": weights.form, "act": weights.act}
    if k_min is None:
        found = kernels_gradients(dy, x, choice, weights, set(wanted), order=order, kept=kept)
        if found is not None:
            return found
        names = "x", *(name for name, tensor in weights.tensors._asdict().items() if tensor is not None)
        return dict(zip(names, plain.backward(dy, x, choice, *weights.tensors, **facts), strict=True))
    found = kernels_gradients(dy, x, chosen(choice, k_min), weights, set(wanted), choice=(choice.dtype, k_min))
    if found is not None:
        return found
    nothing, options = x.new_empty(0), {"k_min": k_min, "wanted": wanted, **facts}
    grads = plain.relaxed_backward(dy, nothing, nothing, x, choice, *weights.tensors, **options)
    return dict(zip(wanted, grads, strict=True))
