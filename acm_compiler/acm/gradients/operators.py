"""`acm::relaxed`, the output of a relaxed choice in compiled graphs, and the backward of both operators of learners.

`acm::learners` keeps its inputs alone, and its backward computes the hidden layer again. `acm::relaxed` also gives the
products of the first layer, of all learners and in sorted order, for its backward; on a CUDA device it keeps nothing,
as the kernels there compute them where they need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import LearnersArguments, LearnerWeights, Weights, part, schema
from acm_compiler.acm.check_arguments import may_equal, require_learners
from acm_compiler.acm.gradients.sorted_tokens import (
    activated,
    bands_of_hidden,
    chosen,
    differentiated,
    first_layer,
    gradients,
    order_of,
    pays,
    second_layer,
)
from acm_compiler.acm.ops import FORM, LEARNERS, LIBRARY, run_call
from acm_compiler.acm.quantized import integers
from acm_compiler.acm.reference import relaxed_output

_CHOICE = f"Tensor x, Tensor nu, {schema(LearnerWeights)}, *, int k_min, {FORM}"
LIBRARY.define(f"learners_backward(Tensor dy, {schema(LearnersArguments)}, *, {FORM}) -> Tensor[]")
LIBRARY.define(f"relaxed({_CHOICE}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(f"relaxed_backward(Tensor dy, Tensor a, Tensor up, {_CHOICE}, str[] wanted) -> Tensor[]")
LEARNERS_BACKWARD = torch.ops.acm.learners_backward
RELAXED = torch.ops.acm.relaxed
RELAXED_BACKWARD = torch.ops.acm.relaxed_backward
_INPUTS = ("x", "nu", *LearnerWeights._fields)


def backward(dy: Tensor, x: Tensor, k: Tensor, *tensors: Any, form: str, act: str) -> list[Tensor]:
    """Gradients of x and of the weights that are there and no integers, in their order; in plain torch."""
    call = LearnersArguments(x, k, *tensors)
    names = ["x", *learned(call)]
    if call.s_in is not None:  # gradients pass the rounding of weights and of activations as if there were none
        floats = integers.dequantized(Weights.of(call, form=form, act=act))
        call = call._replace(**floats.tensors._asdict())
    require_learners(call, form=form)
    if not x.shape[0]:
        return [torch.zeros_like(getattr(call, name)) for name in names]
    weights = Weights.of(call, form=form, act=act)
    if not pays(x, weights):
        return _by_reference(dy, call, names, form=form, act=act)
    order = order_of(k, weights.learners)
    xs = order.sort(x)
    hidden = [activated(first_layer(xs, band, weights), weights) for band in order.bands]
    found = gradients(dy, xs, hidden, weights, order, set(names)) | {"residual": dy}
    return [own(found[name], dy) for name in names]


def _by_reference(dy: Tensor, call: LearnersArguments, names: list[str], *, form: str, act: str) -> list[Tensor]:
    with differentiated():
        leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
        y = run_call(call._replace(**leaves), form=form, act=act)
        grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    found = zip(leaves.values(), grads, strict=True)
    return [torch.zeros_like(leaf) if grad is None else own(grad, dy) for leaf, grad in found]


def learned(call: LearnersArguments) -> list[str]:
    """Names of the weights that are there and have gradients: quantised ones have none, nor have their scales."""
    fixed = ("x", "k") if call.s_in is None else ("x", "k", *integers.WEIGHTS, *integers.SCALES)
    return [name for name, tensor in call._asdict().items() if tensor is not None and name not in fixed]


def own(grad: Tensor, dy: Tensor) -> Tensor:
    """A contiguous `grad` that is no alias of `dy`: a compiler may go on writing there."""
    return grad.clone() if grad.data_ptr() == dy.data_ptr() else grad.contiguous()


def _backward_fake(dy: Tensor, x: Tensor, k: Tensor, *tensors: Any, form: str, act: str) -> list[Tensor]:
    call = LearnersArguments(x, k, *tensors)
    require_learners(call, form=form, same=may_equal)
    return [t.new_empty(t.shape) for t in (x, *(getattr(call, name) for name in learned(call)))]


def _save_for_backward(ctx, inputs, keyword_only_inputs, output) -> None:
    call = LearnersArguments(*inputs)
    ctx.save_for_backward(call.x, call.k, *part(LearnerWeights, call))
    ctx.has_residual, ctx.options = call.residual is not None, keyword_only_inputs


def _run_backward(ctx, dy: Tensor):
    x, k, *weights = ctx.saved_tensors
    call = LearnersArguments(x, k, *weights)
    if torch.is_grad_enabled() and call.s_in is None and x.shape[0]:
        grads = differentiable(run_call(call, **ctx.options), call._asdict(), ctx.needs_input_grad, dy)
    else:
        found = LEARNERS_BACKWARD(dy, x, k, *weights, **ctx.options)
        grads = dict(zip(("x", *learned(call)), found, strict=True))
    grads["residual"] = dy if ctx.has_residual else None
    return tuple(grads.get(name) for name in LearnersArguments._fields)


def differentiable(
    y: Tensor, inputs: dict[str, Tensor | None], wants: Sequence[bool], dy: Tensor
) -> dict[str, Tensor | None]:
    """Gradients by name that are to be differentiated, from a reference's output; inputs in the order of `wants`."""
    named = zip(inputs.items(), wants, strict=False)
    leaves = {name: tensor for (name, tensor), wants_it in named if wants_it and tensor is not None}
    grads = torch.autograd.grad(y, list(leaves.values()), dy, create_graph=True, allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


def _relaxed(x: Tensor, nu: Tensor, *tensors: Any, k_min: int, form: str, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """y [T, O] and the products of the first layer, [T, N * H] each; the last is empty where learners are not gated."""
    if x.device.type == "cuda":
        return LEARNERS(x, chosen(nu, k_min), *tensors, form=form, act=act), x.new_empty(0), x.new_empty(0)
    weights = Weights(*tensors, act=act, form=form)
    order = order_of(chosen(nu, k_min), weights.learners)
    (every,) = bands_of_hidden(order, weights, every=True)
    made = first_layer(order.sort(x), every, weights)
    y = second_layer([activated(made, weights)], weights, order)
    a, up = made if len(made) == 2 else (*made, x.new_empty(0))
    return y, a, up


def _relaxed_fake(
    x: Tensor, nu: Tensor, *tensors: Any, k_min: int, form: str, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    w, tokens = LearnerWeights(*tensors), x.shape[0]
    y = x.new_empty(tokens, w.b_out.shape[1])
    if x.device.type == "cuda":
        return y, x.new_empty(0), x.new_empty(0)
    values = w.w_in.shape[0] * w.w_in.shape[1]
    up = x.new_empty(0) if w.w_up is None else x.new_empty(tokens, values)
    return y, x.new_empty(tokens, values), up


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
    """The wanted gradients, in their order; in plain torch."""
    weights = Weights(*tensors, act=act, form=form)
    order = order_of(chosen(nu, k_min), weights.learners)
    xs, (every,) = order.sort(x), bands_of_hidden(order, weights, every=True)
    made = first_layer(xs, every, weights) if x.device.type == "cuda" else [a] if weights.w_up is None else [a, up]
    found = gradients(dy, xs, [activated(made, weights)], weights, order, set(wanted), choice=(nu.dtype, k_min))
    return [own(found[name], dy) for name in wanted]


def _relaxed_backward_fake(
    dy: Tensor, a: Tensor, up: Tensor, *inputs: Any, k_min: int, form: str, act: str, wanted: list[str]
) -> list[Tensor]:
    named = dict(zip(_INPUTS, inputs, strict=False))
    return [named[name].new_empty(named[name].shape) for name in wanted]


def _save_for_choice(ctx, inputs, keyword_only_inputs, output) -> None:
    _, a, up = output
    ctx.mark_non_differentiable(a, up)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, up, *inputs)
    ctx.options = keyword_only_inputs


def _run_choice_backward(ctx, dy: Tensor | None, *_: None):
    a, up, *inputs = ctx.saved_tensors
    wanted = [name for name, wants_it in zip(_INPUTS, ctx.needs_input_grad, strict=False) if wants_it]
    if dy is None:
        return (None,) * len(_INPUTS)
    if torch.is_grad_enabled():
        x, nu, *tensors = inputs
        k_min, options = ctx.options["k_min"], {name: ctx.options[name] for name in ("act", "form")}
        y = relaxed_output(x, nu, Weights(*tensors, **options), k_min)
        grads = differentiable(y, dict(zip(_INPUTS, inputs, strict=True)), ctx.needs_input_grad, dy)
    else:
        found = RELAXED_BACKWARD(dy, a, up, *inputs, **ctx.options, wanted=wanted)
        grads = dict(zip(wanted, found, strict=True))
    return tuple(grads.get(name) for name in _INPUTS)


def _register(name: str, function: Any, fake: Any) -> None:
    torch.library.impl(name, "CompositeExplicitAutograd", function, lib=LIBRARY)
    torch.library.register_fake(name, fake, lib=LIBRARY)


_register("acm::learners_backward", backward, _backward_fake)
_register("acm::relaxed", _relaxed, _relaxed_fake)
_register("acm::relaxed_backward", relaxed_backward, _relaxed_backward_fake)
torch.library.register_autograd("acm::learners", _run_backward, setup_context=_save_for_backward, lib=LIBRARY)
torch.library.register_autograd("acm::relaxed", _run_choice_backward, setup_context=_save_for_choice, lib=LIBRARY)
