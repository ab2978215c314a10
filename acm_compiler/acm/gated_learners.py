"""`acm::gated_learners`: gate and learners in one call, which compilers put where nothing is to be differentiated.

y = learners(z, gate(z)) + residual, where z is x or, with `norm_eps`, LayerNorm(x) over a token's features: the norm in
front of a site then belongs to its operator, and no copy of the normalised tokens is made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import eq
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.operands import may_equal, require_gate, require_learners, require_together
from acm_compiler.acm.ops import CHOICES, GATE, GATE_WEIGHTS, LEARNERS, LIBRARY, WEIGHTS, load_kernels, mapped_tokens
from acm_compiler.acm.reference import Norm, layer_norm
from acm_compiler.errors import UsageError

_SCHEMA = (
    f"(Tensor x, {GATE_WEIGHTS}, Tensor knob, Tensor k_lo, Tensor k_hi, {WEIGHTS}, "
    "Tensor? residual=None, Tensor? norm_weight=None, Tensor? norm_bias=None, *, "
    f"{CHOICES}, str form, str act, float? norm_eps=None) -> Tensor"
)
LIBRARY.define(f"gated_learners{_SCHEMA}")
LIBRARY.define(f"gated_learners_reference{_SCHEMA}")
_FIXED = 15  # x and what no copy of a mapped call has for itself: weights, knob and bounds
_NORM = 16  # the norm's position among the arguments


def _gated(*tensors: Tensor | None, **options) -> Tensor:
    """What runs where no kernel has taken over: norm, gate, learners."""
    x = tensors[0]
    assert x is not None
    if load_kernels(x.device.type):
        return GATED(*tensors, **options)
    return run_apart(*tensors, **options)


def run_apart(*tensors: Tensor | None, form: str, act: str, norm_eps: float | None = None, **choices) -> Tensor:
    """The operator as a sequence of others; the knob may be the bits of its float32."""
    if norm_eps is None:  # gate and learners look at the rest
        require_together(tensors, k_min=choices["k_min"], norm=False)
    else:
        require_operands(tensors, form=form, k_min=choices["k_min"], rule=choices["rule"], norm_eps=norm_eps)
    x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, *weights = tensors[:_NORM]
    assert x is not None and knob is not None
    z = normalised(x, *tensors[_NORM:], eps=norm_eps)
    number = knob.view(torch.float32) if knob.dtype == torch.int32 else knob
    k = GATE(z, w_inner, b_inner, w_outer, b_outer, number, k_lo, k_hi, **choices)
    return LEARNERS(z, k, *weights, form=form, act=act)


def normalised(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float | None) -> Tensor:
    """What gate and learners read: x itself where no norm belongs to the operator."""
    return x if eps is None else layer_norm(x, Norm(weight=weight, bias=bias, eps=eps))


def require_operands(
    tensors: Sequence[Tensor | None],
    *,
    form: str,
    k_min: int,
    rule: str,
    norm_eps: float | None,
    same: Callable[[Any, Any], bool] = eq,
) -> None:
    """UsageError naming the first operand that does not fit the others."""
    x = tensors[0]
    assert x is not None
    require_gate(x, tensors[1:5], tensors[5:8], k_min=k_min, rule=rule, same=same)  # type: ignore[arg-type]
    require_learners(x, None, tensors[8:_NORM], form, same)
    require_together(tensors, k_min=k_min, norm=norm_eps is not None, same=same)


def _fake(
    *tensors: Tensor | None, form: str, act: str, cost: float, k_min: int, rule: str, norm_eps: float | None = None
) -> Tensor:
    require_operands(tensors, form=form, k_min=k_min, rule=rule, norm_eps=norm_eps, same=may_equal)
    x, b_out = tensors[0], tensors[13]
    assert x is not None and b_out is not None
    return x.new_empty(x.shape[0], b_out.shape[1])


def _vmap(info, in_dims, *tensors, **options):
    if any(dim is not None for dim in (*in_dims[1:_FIXED], *in_dims[_NORM:])):
        raise UsageError("vmap over the weights of an ACM", fix="map over the inputs only")
    x, *residual = (
        mapped_tokens(info, tensors[place], in_dims[place]) for place in (0, _FIXED) if place < len(tensors)
    )
    y = GATED(x, *tensors[1:_FIXED], *residual, *tensors[_NORM:], **options)
    return y.unflatten(0, (info.batch_size, -1)), 0


torch.library.impl("acm::gated_learners", "CompositeExplicitAutograd", _gated, lib=LIBRARY)
torch.library.impl("acm::gated_learners_reference", "CompositeExplicitAutograd", run_apart, lib=LIBRARY)
torch.library.register_fake("acm::gated_learners", _fake, lib=LIBRARY)
torch.library.register_vmap("acm::gated_learners", _vmap, lib=LIBRARY)

GATED = torch.ops.acm.gated_learners
