"""FLOPs of `acm::learners` and `acm::gate` for torch's FlopCounterMode: those of the learners that tokens really run.

The one border where MACs become FLOPs (1 MAC = 2 FLOPs). Where k is not known (fake tensors), all N learners count.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from acm_compiler.acm.arguments import GatedArguments, LearnerWeights, part
from acm_compiler.acm.gated_learners import GATED, gate_call, tokens_of
from acm_compiler.acm.ops import GATE, LEARNERS, LEARNERS_BACKWARD


def learners_macs(x: Tensor, k: Tensor, *tensors: Any, form: str) -> int:
    """Executed MACs; the arguments of the operator."""
    w = LearnerWeights(*tensors[: len(LearnerWeights._fields)])
    n_learners = w.w_in.shape[0]
    per_learner = w.w_in[0].numel()
    if w.w_out is not None:
        per_learner += w.w_in.shape[1] * (w.b_out.shape[1] + (w.w_in.shape[2] if w.w_up is not None else 0))
    run = _learners_run(k, n_learners)
    if form != "linear" or w.w_top is None:
        return run * per_learner
    # at k = N the dense weight runs in the learners' place
    whole = k.numel() if run == n_learners * k.numel() else int((k == n_learners).sum())
    return (run - whole * n_learners) * per_learner + whole * w.w_top.numel()


def _learners_run(k: Tensor, n_learners: int) -> int:
    unknown = isinstance(k, FakeTensor) or k.device.type == "meta"
    return n_learners * k.numel() if unknown else int(k.sum())


@register_flop_formula(LEARNERS, get_raw=True)
def learners_flops(*tensors, form, act, out_val=None) -> int:
    """FLOPs of the forward."""
    return 2 * learners_macs(*tensors, form=form)


@register_flop_formula(LEARNERS_BACKWARD, get_raw=True)
def learners_backward_flops(dy, *tensors, form, act, out_val=None) -> int:
    """FLOPs of the backward: the forward again, then the gradients of inputs and of weights."""
    return 3 * 2 * learners_macs(*tensors, form=form)


@register_flop_formula(GATE, get_raw=True)
def gate_flops(x, w_inner, b_inner, w_outer, *tensors, out_val=None, **choices) -> int:
    """FLOPs of the gate."""
    return 2 * x.shape[0] * (w_inner.numel() + w_outer.numel())


@register_flop_formula(GATED, get_raw=True)
def gated_flops(*tensors, form, act, norm_eps=None, norm_centred=True, out_val=None, **choices) -> int:
    """FLOPs of both; the gate runs once more, as the learners' cost follows from its choices."""
    call = GatedArguments(*tensors)
    gate = gate_call(call, tokens_of(call, norm_eps, norm_centred))
    k, weights = GATE(*gate, **choices), part(LearnerWeights, call)
    return gate_flops(*gate) + 2 * learners_macs(call.x, k, *weights, form=form)
