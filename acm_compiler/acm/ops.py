"""`acm::learners`: the one operator of an ACM, a single node in compiled and exported graphs.

The eager kernel is the reference; backends register faster ones for the same name. Its backward recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from acm_compiler.acm.reference import Weights, run_learners

_WEIGHTS = "Tensor w_in, Tensor? b_in, Tensor? w_up, Tensor? b_up, Tensor w_out, Tensor b_out, Tensor? w_top"
_TENSORS = f"Tensor x, Tensor k, {_WEIGHTS}"
_LIBRARY = torch.library.Library("acm", "DEF")
_LIBRARY.define(f"learners({_TENSORS}, *, str form, str act) -> Tensor")
_LIBRARY.define(f"learners_backward(Tensor dy, {_TENSORS}, *, str form, str act) -> Tensor[]")


def learners(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """y_{k(t)}(x_t), [T, O]: one operator when a graph is being made, the plain reference otherwise.

    Under autocast the inputs are cast as a linear's would be.
    """
    device = x_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return learners(x_TD.to(dtype), k_T, cast_weights(weights, dtype))
    if not torch.compiler.is_compiling():
        return run_learners(x_TD, k_T, weights)
    w = weights
    tensors = (w.w_in, w.b_in, w.w_up, w.b_up, w.w_out, w.b_out, w.w_top)
    return torch.ops.acm.learners(x_TD, k_T, *tensors, form=w.form, act=w.act)


def cast_weights(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same weights in another floating type."""

    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    w = weights
    return Weights(
        w_in=w.w_in.to(dtype),
        b_in=cast(w.b_in),
        w_up=cast(w.w_up),
        b_up=cast(w.b_up),
        w_out=w.w_out.to(dtype),
        b_out=w.b_out.to(dtype),
        w_top=cast(w.w_top),
        act=w.act,
        form=w.form,
    )


def _weights(tensors: Sequence[Tensor | None], form: str, act: str) -> Weights:
    w_in, b_in, w_up, b_up, w_out, b_out, w_top = tensors
    assert w_in is not None and w_out is not None and b_out is not None
    return Weights(
        w_in=w_in, b_in=b_in, w_up=w_up, b_up=b_up, w_out=w_out, b_out=b_out, w_top=w_top, form=form, act=act
    )


def _forward(x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    y = run_learners(x, k, _weights(tensors, form, act))
    # an operator must not return an alias of what it was given
    return y.clone() if y.data_ptr() == x.data_ptr() and y.numel() else y


def _forward_fake(x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    b_out = tensors[5]
    assert b_out is not None
    return x.new_empty(x.shape[0], b_out.shape[1])


def _backward(dy: Tensor, x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> list[Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        inputs = [x, *(leaf for leaf in leaves if leaf is not None)]
        y = run_learners(x, k, _weights(leaves, form, act))
        grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g.contiguous() for i, g in zip(inputs, grads, strict=True)]


def _backward_fake(dy: Tensor, x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, *tensors) if t is not None]


def _save_for_backward(ctx, inputs, keyword_only_inputs, output) -> None:
    x, k, *tensors = inputs
    ctx.present = [t is not None for t in (x, *tensors)]
    ctx.save_for_backward(x, k, *tensors)
    ctx.form, ctx.act = keyword_only_inputs["form"], keyword_only_inputs["act"]


def _run_backward(ctx, dy: Tensor):
    x, k, *tensors = ctx.saved_tensors
    grads = iter(torch.ops.acm.learners_backward(dy, x, k, *tensors, form=ctx.form, act=ctx.act))
    dx, *others = [next(grads) if present else None for present in ctx.present]
    return (dx, None, *others)


torch.library.impl("acm::learners", "CompositeExplicitAutograd", _forward, lib=_LIBRARY)
torch.library.impl("acm::learners_backward", "CompositeExplicitAutograd", _backward, lib=_LIBRARY)
torch.library.register_fake("acm::learners", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("acm::learners_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd("acm::learners", _run_backward, setup_context=_save_for_backward, lib=_LIBRARY)

LEARNERS = torch.ops.acm.learners
