"""FLOPs of this package's operators for torch's FlopCounterMode: of learners those that tokens really run.

The one border where MACs become FLOPs (1 MAC = 2 FLOPs). Where k is not known (fake tensors), all N learners count.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from acm_compiler.acm.arguments import GatedArguments, LearnerWeights, Weights, part
from acm_compiler.acm.gated_learners import GATED, gate_call, tokens_of
from acm_compiler.acm.gradients.operators import LEARNERS_BACKWARD, RELAXED, RELAXED_BACKWARD
from acm_compiler.acm.gradients.sorted_tokens import chosen, pays
from acm_compiler.acm.ops import GATE, LEARNERS
from acm_compiler.acm.steps import ATTENTION, STEPS, read_program


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
def learners_backward_flops(dy, x, k, *tensors, form, act, out_val=None) -> int:
    """FLOPs of the backward: the first layer again (of learners over sorted tokens; else both), then all gradients."""
    forward = learners_macs(x, k, *tensors, form=form)
    weights = Weights(*tensors[: len(LearnerWeights._fields)], act=act, form=form)
    if not pays(x, weights):
        return 2 * 3 * forward
    first, second = _layer_macs(weights)
    return 2 * _learners_run(k, weights.learners) * (3 * first + 2 * second)


@register_flop_formula(RELAXED, get_raw=True)
def relaxed_flops(x, nu, *tensors, k_min, form, act, out_val=None) -> int:
    """FLOPs of a relaxed choice: the first layer of all learners (on CUDA devices of those that run), the second."""
    weights = Weights(*tensors, act=act, form=form)
    first, second = _layer_macs(weights)
    run = _learners_run(chosen(nu, k_min), weights.learners)
    return 2 * ((run if x.device.type == "cuda" else x.shape[0] * weights.learners) * first + run * second)


@register_flop_formula(RELAXED_BACKWARD, get_raw=True)
def relaxed_backward_flops(dy, a, up, x, nu, *tensors, k_min, form, act, wanted, out_val=None) -> int:
    """FLOPs of its backward: what reaches all learners, and all else of those that run; of what is wanted."""
    weights = Weights(*tensors, act=act, form=form)
    first, second = _layer_macs(weights)
    of_branch = first // (1 if weights.w_up is None else 2)
    each = {"x": first, "w_in": of_branch, "w_up": of_branch, "w_out": second}
    run, tokens = _learners_run(chosen(nu, k_min), weights.learners), x.shape[0]
    again = first if x.device.type == "cuda" else 0
    whole = tokens * weights.learners * (second + again) + tokens * weights.b_out.numel()
    return 2 * (whole + run * sum(each.get(name, 0) for name in wanted))


def _layer_macs(weights: Weights) -> tuple[int, int]:
    """MACs of one learner for one token: of its first layer, both branches, and of its second."""
    first = weights.w_in[0].numel() * (1 if weights.w_up is None else 2)
    return first, weights.w_in.shape[1] * weights.b_out.shape[1]


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


@register_flop_formula(STEPS, get_raw=True)
def steps_flops(tensors, program, out_val=None) -> int:
    """FLOPs of the ACMs among the steps, which run once more, as the cost of each follows from what it reads."""
    counts = []

    def gated(*operands: Any, **options: Any) -> Tensor:
        counts.append(gated_flops(*operands, **options))
        return GATED(*operands, **options)

    read_program(program).run(tensors, gated)
    return sum(counts)


@register_flop_formula(ATTENTION)
def attention_flops(q_shape, k_shape, v_shape, *, scale, causal, out_shape=None) -> int:
    """FLOPs of an attention, as torch counts its own: both products, the masked half of a causal one, too."""
    return sdpa_flop_count(q_shape, k_shape, v_shape)
