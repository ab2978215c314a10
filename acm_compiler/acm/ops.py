"""`acm::learners` and `acm::gate`: an ACM's operators, single nodes in compiled and exported graphs.

y = learners(x, k) + residual, where `residual` [T, O] is optional (compilers put the bypass there).
The eager kernel is the reference; backends register faster ones for the same name. Its backward recomputes.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from acm_compiler.acm.intact import refuse_onnx
from acm_compiler.acm.operands import may_equal, require_gate, require_learners
from acm_compiler.acm.reference import Weights, branchless_output, choice_costs, choose_k, run_learners, utilities
from acm_compiler.errors import UsageError

WEIGHTS = "Tensor w_in, Tensor? b_in, Tensor? w_up, Tensor? b_up, Tensor? w_out, Tensor b_out, Tensor? w_top"
_TENSORS = f"Tensor x, Tensor k, {WEIGHTS}, Tensor? residual=None"
LIBRARY = torch.library.Library("acm", "DEF")
# where the kernels of a device are; imported at the first call on such a device, never before
_KERNELS = {"cpu": "acm_compiler.codegen.cpu", "cuda": "acm_compiler.codegen.gpu"}
_ASKED: set[str] = set()
LIBRARY.define(f"learners({_TENSORS}, *, str form, str act) -> Tensor")
LIBRARY.define(f"learners_reference({_TENSORS}, *, str form, str act) -> Tensor")
GATE_WEIGHTS = "Tensor w_inner, Tensor b_inner, Tensor w_outer, Tensor b_outer"
CHOICES = "float cost, int k_min, str rule"
_GATE = f"Tensor x, {GATE_WEIGHTS}, Tensor knob, Tensor k_lo, Tensor k_hi, *, {CHOICES}"
LIBRARY.define(f"gate({_GATE}) -> Tensor")
LIBRARY.define(f"gate_reference({_GATE}) -> Tensor")
LIBRARY.define(f"learners_backward(Tensor dy, {_TENSORS}, *, str form, str act) -> Tensor[]")


def learners(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """y_{k(t)}(x_t), [T, O]: one operator in graphs and wherever no gradient is asked for, else the plain reference.

    Under autocast the inputs are cast as a linear's would be.
    """
    device = x_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return learners(x_TD.to(dtype), k_T, cast_weights(weights, dtype))
    w = weights
    tensors = (w.w_in, w.b_in, w.w_up, w.b_up, w.w_out, w.b_out, w.w_top)
    pushed_forward = forward_ad._current_level >= 0  # the operator has no rule for tangents
    mapped, transformed = (False, False) if torch.compiler.is_compiling() else transforms()
    if mapped and (transformed or pushed_forward):
        return branchless_output(x_TD, k_T, weights)
    if mapped or torch.compiler.is_compiling():
        return torch.ops.acm.learners(x_TD, k_T, *tensors, form=w.form, act=w.act)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TD, *tensors))
    if observed() or differentiated or pushed_forward:
        require_learners(x_TD, k_T, tensors, w.form)
        return run_learners(x_TD, k_T, weights)
    # nothing to differentiate: past the autograd rule, which costs more than a small site's kernel
    with torch._C._AutoDispatchBelowAutograd():
        return LEARNERS.default(x_TD, k_T, *tensors, form=w.form, act=w.act)


def gate_is_operator(x_TD: Tensor) -> bool:
    """Whether `run_gate` is there for this call; elsewhere a gate stays plain torch, which compilers fuse."""
    return x_TD.device.type in _KERNELS and (torch.compiler.is_compiling() or not observed())


def run_gate(
    x_TD: Tensor, weights: Sequence[Tensor], choices: Sequence[Tensor], *, cost: float, k_min: int, rule: str
) -> Tensor:
    """k of every token, int32 [T], by one operator.

    weights: of the gate's two linears, weight and bias each. choices: knob, k_lo and k_hi, scalars. cost: of one
    learner of the site, in units of the mean site's.
    """
    if torch.compiler.is_compiling():
        return torch.ops.acm.gate(x_TD, *weights, *choices, cost=cost, k_min=k_min, rule=rule)
    with torch._C._AutoDispatchBelowAutograd():
        return GATE.default(x_TD, *weights, *choices, cost=cost, k_min=k_min, rule=rule)


def is_freezing() -> bool:
    """Whether a graph is being made whose parameters and buffers Inductor will make constants of (its freezing)."""
    if not torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    from torch._inductor import config  # there already when this is traced

    return config.freezing


def transforms() -> tuple[bool, bool]:
    """Whether vmap is among the `torch.func` transforms that call, and whether any other is.

    Alone it takes the operator, whose rule makes one call of all copies; with others it needs plain operations.
    """
    kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack() or ()}
    vmap = torch._C._functorch.TransformType.Vmap
    return vmap in kinds, bool(kinds - {vmap})


def observed() -> bool:
    """Whether someone's dispatch mode (a FLOP counter, a logger) watches: it should see plain operations."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(getattr(mode, "_mode_key", None) is None for mode in _get_current_dispatch_mode_stack())


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
        w_out=cast(w.w_out),
        b_out=w.b_out.to(dtype),
        w_top=cast(w.w_top),
        act=w.act,
        form=w.form,
    )


def _run(x: Tensor, k: Tensor, tensors: Sequence[Tensor | None], form: str, act: str) -> Tensor:
    """The reference; `tensors` are the weights in the schema's order and then perhaps the residual."""
    require_learners(x, k, tensors, form)
    y = run_learners(x, k, weights_of(tensors[:7], form, act))
    return y if len(tensors) < 8 or tensors[7] is None else y + tensors[7]


def weights_of(tensors: Sequence[Tensor | None], form: str, act: str) -> Weights:
    """The weights from the operators' arguments w_in to w_top."""
    w_in, b_in, w_up, b_up, w_out, b_out, w_top = tensors
    assert w_in is not None and b_out is not None
    return Weights(
        w_in=w_in, b_in=b_in, w_up=w_up, b_up=b_up, w_out=w_out, b_out=b_out, w_top=w_top, form=form, act=act
    )


def load_kernels(device: str) -> bool:
    """Whether kernels for that type of device have taken over just now: they are asked once."""
    if device in _ASKED or device not in _KERNELS:
        return False
    _ASKED.add(device)
    return importlib.import_module(_KERNELS[device]).take_over()


def has_kernels(device: str) -> bool:
    """Whether kernels are in charge on that type of device."""
    return device in _KERNELS and torch._C._dispatch_has_kernel_for_dispatch_key("acm::learners", device.upper())


def _forward(x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    """What runs where no kernel has taken over."""
    op = LEARNERS if load_kernels(x.device.type) else REFERENCE
    return op(x, k, *tensors, form=form, act=act)


def _reference(x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    y = _run(x, k, tensors, form, act)
    # an operator must not return an alias of what it was given
    return y.clone() if y.data_ptr() == x.data_ptr() and y.numel() else y


def _forward_fake(x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    refuse_onnx()
    require_learners(x, k, tensors, form, may_equal)
    b_out = tensors[5]
    assert b_out is not None
    return x.new_empty(x.shape[0], b_out.shape[1])


def _backward(dy: Tensor, x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> list[Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        inputs = [x, *(leaf for leaf in leaves if leaf is not None)]
        y = _run(x, k, leaves, form, act)
        grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    return [torch.zeros_like(i) if g is None else _own(g, dy) for i, g in zip(inputs, grads, strict=True)]


def _own(grad: Tensor, dy: Tensor) -> Tensor:
    """A contiguous `grad` that is no alias of `dy`: a compiler may go on writing there."""
    return grad.clone() if grad.data_ptr() == dy.data_ptr() else grad.contiguous()


def _backward_fake(dy: Tensor, x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> list[Tensor]:
    require_learners(x, k, tensors, form, may_equal)
    return [t.new_empty(t.shape) for t in (x, *tensors) if t is not None]


def _save_for_backward(ctx, inputs, keyword_only_inputs, output) -> None:
    x, k, *tensors = inputs
    weights, residual = tensors[:7], tensors[7:]
    ctx.present = [t is not None for t in (x, *weights)]
    ctx.residual = [t is not None for t in residual]
    ctx.save_for_backward(x, k, *weights)
    ctx.form, ctx.act = keyword_only_inputs["form"], keyword_only_inputs["act"]


def _run_backward(ctx, dy: Tensor):
    x, k, *weights = ctx.saved_tensors
    grads = iter(torch.ops.acm.learners_backward(dy, x, k, *weights, form=ctx.form, act=ctx.act))
    dx, *others = [next(grads) if present else None for present in ctx.present]
    return (dx, None, *others, *[dy if present else None for present in ctx.residual])


def _gate(*args: Tensor, **kwargs) -> Tensor:
    """What runs where no kernel has taken over."""
    return (GATE if load_kernels(args[0].device.type) else GATE_REFERENCE)(*args, **kwargs)


def _gate_reference(x: Tensor, *args: Tensor, cost: float, k_min: int, rule: str) -> Tensor:
    require_gate(x, args[:4], args[4:], k_min=k_min, rule=rule)
    w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi = args
    with torch.autocast(x.device.type, enabled=False):
        score_TC = F.linear(F.gelu(F.linear(x.to(w_inner.dtype), w_inner, b_inner)), w_outer, b_outer)
    score_TC = score_TC.double() if x.dtype == torch.float64 else score_TC.float()
    cost_C = choice_costs(cost, k_min=k_min, n_learners=k_min + score_TC.shape[1] - 1, device=x.device)
    u_TC = utilities(score_TC, knob, cost_C, rule)
    return choose_k(u_TC, k_lo, k_hi, k_min)


def _gate_fake(x: Tensor, *args: Tensor, cost: float, k_min: int, rule: str) -> Tensor:
    require_gate(x, args[:4], args[4:], k_min=k_min, rule=rule, same=may_equal)
    return x.new_empty(x.shape[0], dtype=torch.int32)


def mapped_tokens(info, value: Tensor | None, dim: int | None) -> Tensor | None:
    """[T, D] of all copies as one, [copies * T, D]."""
    if value is None:
        return None
    spread = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
    return spread.flatten(0, 1)


def _gate_vmap(info, in_dims, x, *args, **kwargs):
    if any(dim is not None for dim in in_dims[1:]):
        raise UsageError("vmap over the gate of an ACM", fix="map over the inputs only")
    x_BTD = x.movedim(in_dims[0], 0)
    return GATE(x_BTD.flatten(0, 1), *args, **kwargs).unflatten(0, (info.batch_size, -1)), 0


def _vmap(info, in_dims, x, k, *tensors, **kwargs):
    """One call for all copies: tokens are independent, so the mapped axis is one more axis of tokens."""
    if any(dim is not None for dim in in_dims[2:9]):
        raise UsageError("vmap over the weights of an ACM", fix="map over the inputs only")

    residual = [mapped_tokens(info, value, dim) for value, dim in zip(tensors[7:], in_dims[9:], strict=True)]
    x, k = (mapped_tokens(info, value, dim) for value, dim in zip((x, k), in_dims[:2], strict=True))
    y = LEARNERS(x, k, *tensors[:7], *residual, **kwargs)
    return y.unflatten(0, (info.batch_size, -1)), 0


torch.library.impl("acm::gate", "CompositeExplicitAutograd", _gate, lib=LIBRARY)
torch.library.impl("acm::gate_reference", "CompositeExplicitAutograd", _gate_reference, lib=LIBRARY)
torch.library.register_fake("acm::gate", _gate_fake, lib=LIBRARY)
torch.library.register_vmap("acm::gate", _gate_vmap, lib=LIBRARY)
torch.library.impl("acm::learners", "CompositeExplicitAutograd", _forward, lib=LIBRARY)
torch.library.impl("acm::learners_reference", "CompositeExplicitAutograd", _reference, lib=LIBRARY)
torch.library.impl("acm::learners_backward", "CompositeExplicitAutograd", _backward, lib=LIBRARY)
torch.library.register_fake("acm::learners", _forward_fake, lib=LIBRARY)
torch.library.register_fake("acm::learners_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd("acm::learners", _run_backward, setup_context=_save_for_backward, lib=LIBRARY)
torch.library.register_vmap("acm::learners", _vmap, lib=LIBRARY)

LEARNERS = torch.ops.acm.learners
REFERENCE = torch.ops.acm.learners_reference
GATE = torch.ops.acm.gate
GATE_REFERENCE = torch.ops.acm.gate_reference
LEARNERS_BACKWARD = torch.ops.acm.learners_backward
