"""`acm::gated_learners`: gate and learners in one call, which compilers put where nothing is to be differentiated.

y = learners(z, gate(z)) + residual, where z is x or, with `norm_eps`, LayerNorm(x) over a token's features, RMSNorm(x)
where not `norm_centred`: the norm in front of a site then belongs to its operator, and no copy of the normalised tokens
is made for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import GateArguments, GatedArguments, LearnersArguments, LearnerWeights, part, schema
from acm_compiler.acm.check_arguments import may_equal, require_gated, require_together
from acm_compiler.acm.ops import CHOICES, FORM, GATE, LEARNERS, define, map_tokens
from acm_compiler.acm.reference import Norm, normalised

_SCHEMA = f"({schema(GatedArguments)}, *, {CHOICES}, {FORM}, float? norm_eps=None, bool norm_centred=True) -> Tensor"


def run_apart(
    *tensors: Any, form: str, act: str, norm_eps: float | None = None, norm_centred: bool = True, **choices
) -> Tensor:
    """The operator as a sequence of others; the knob may be the bits of its float32."""
    call = GatedArguments(*tensors)
    if norm_eps is None:  # gate and learners look at the rest
        require_together(call, k_min=choices["k_min"], norm=False)
    else:
        require_gated(call, form=form, k_min=choices["k_min"], rule=choices["rule"], norm_eps=norm_eps)
    z = tokens_of(call, norm_eps, norm_centred)
    k = GATE(*gate_call(call, z), **choices)
    return LEARNERS(*LearnersArguments(z, k, *part(LearnerWeights, call), call.residual), form=form, act=act)


def gate_call(call: GatedArguments, z: Tensor) -> GateArguments:
    """The gate's part of a call, for tokens that are normalised already or need not be."""
    number = call.knob.view(torch.float32) if call.knob.dtype == torch.int32 else call.knob
    return part(GateArguments, call)._replace(x=z, knob=number)


def tokens_of(call: GatedArguments, norm_eps: float | None, norm_centred: bool = True) -> Tensor:
    """Input of gate and learners, [T, D]: x itself where no norm belongs to the operator."""
    norm = norm_of(call, norm_eps, norm_centred)
    return call.x if norm is None else normalised(call.x, norm)


def norm_of(call: GatedArguments, norm_eps: float | None, norm_centred: bool = True) -> Norm | None:
    """The norm that belongs to a call, None where none does."""
    if norm_eps is None:
        return None
    return Norm(weight=call.norm_weight, bias=call.norm_bias, eps=norm_eps, centred=norm_centred)


def fake_gated(
    *tensors: Any,
    form: str,
    act: str,
    cost: float,
    k_min: int,
    rule: str,
    norm_eps: float | None = None,
    norm_centred: bool = True,
) -> Tensor:
    call = GatedArguments(*tensors)
    require_gated(call, form=form, k_min=k_min, rule=rule, norm_eps=norm_eps, same=may_equal)
    return call.x.new_empty(call.x.shape[0], call.b_out.shape[1])


GATED = define("gated_learners", _SCHEMA, run_apart, fake_gated)
map_tokens(GATED, GatedArguments, "weights")
