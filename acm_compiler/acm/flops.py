"""What `acm::learners` and `acm::gate` cost for torch's FlopCounterMode: the learners that the tokens really run.

The one border where MACs become FLOPs (1 MAC = 2 FLOPs). Where k is not known (fake tensors), all N learners count.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from acm_compiler.acm.gated_learners import GATED, normalised
from acm_compiler.acm.ops import GATE, LEARNERS, LEARNERS_BACKWARD


def learners_macs(x: Tensor, k: Tensor, *tensors: Tensor | None, form: str) -> int:
    """Executed MACs; the arguments of the operator."""
    w_in, _, w_up, _, w_out, b_out, w_top, *_ = tensors
    assert w_in is not None and b_out is not None
    n_learners = w_in.shape[0]
    per_learner = w_in[0].numel()
    if w_out is not None:
        per_learner += w_in.shape[1] * (b_out.shape[1] + (w_in.shape[2] if w_up is not None else 0))
    run = _learners_run(k, n_learners)
    if form != "linear" or w_top is None:
        return run * per_learner
    # at k = N the dense weight runs in the learners' place
    whole = k.numel() if run == n_learners * k.numel() else int((k == n_learners).sum())
    return (run - whole * n_learners) * per_learner + whole * w_top.numel()


def _learners_run(k: Tensor, n_learners: int) -> int:
    unknown = isinstance(k, FakeTensor) or k.device.type == "meta"
    return n_learners * k.numel() if unknown else int(k.sum())


@register_flop_formula(LEARNERS, get_raw=True)
def learners_flops(x, k, *tensors, form, act, out_val=None, **kwargs) -> int:
    """FLOPs of the forward."""
    return 2 * learners_macs(x, k, *tensors, form=form)


@register_flop_formula(LEARNERS_BACKWARD, get_raw=True)
def learners_backward_flops(dy, x, k, *tensors, form, act, out_val=None, **kwargs) -> int:
    """FLOPs of the backward: the forward again, then the gradients of inputs and of weights."""
    return 3 * 2 * learners_macs(x, k, *tensors, form=form)


@register_flop_formula(GATE, get_raw=True)
def gate_flops(x, w_inner, b_inner, w_outer, *args, out_val=None, **kwargs) -> int:
    """FLOPs of the gate."""
    return 2 * x.shape[0] * (w_inner.numel() + w_outer.numel())


@register_flop_formula(GATED, get_raw=True)
def gated_flops(x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi, *tensors, out_val=None, **kwargs) -> int:
    """FLOPs of both; the gate runs once more to say what the learners cost."""
    choices = {name: kwargs[name] for name in ("cost", "k_min", "rule")}
    gate = (w_inner, b_inner, w_outer, b_outer)
    z = normalised(x, *tensors[8:], eps=kwargs.get("norm_eps"))
    k = GATE(z, *gate, knob.view(torch.float32), k_lo, k_hi, **choices)
    return gate_flops(x, *gate) + 2 * learners_macs(x, k, *tensors, form=kwargs["form"])
