"""Agreement and distance of two models' outputs.

Shapes: B examples, E examples of a data set, D features, C classes, ... tokens or frames.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from acm_compiler.tasks.base import Task


def agreement(found_E: Tensor, wanted_E: Tensor) -> float:
    """The share of examples (or tokens) with the same prediction, right or wrong."""
    return float((found_E == wanted_E).double().mean())


def distance(task: Task, answer: Tensor, wanted: Tensor) -> Tensor:
    """The distance of `answer` from `wanted`, both as `task.answer` gives them; a scalar with its graph, in fp32.

    Where those are logits [B, ..., C]: KL(wanted || answer) in nats, the mean over tokens that are no padding.
    Else |answer - wanted|^2 / |wanted|^2: for vectors of length 1 twice 1 - cosine.
    """
    wanted, unit = wanted.detach(), distance_unit(task, wanted)
    if not task.answers_logits:
        return (answer.float() - wanted.float()).square().sum() / unit.clamp_min(torch.finfo(unit.dtype).tiny)
    return _Divergence.apply(answer, wanted) / unit.clamp_min(1)


def distance_unit(task: Task, wanted: Tensor) -> Tensor:
    """The divisor of `distance`, a scalar: the number of tokens, or |wanted|^2."""
    # where an answer is 0 throughout there is no token, and nothing adds up
    return (wanted != 0).any(-1).sum() if task.answers_logits else wanted.detach().float().square().sum()


# logits that are turned into probabilities at a time: of a large vocabulary whole copies take gigabytes, and on CPUs
# what stays in the cache is faster
_AT_A_TIME = {"cpu": 2**18, "cuda": 2**24}


class _Divergence(torch.autograd.Function):
    """KL(wanted || answer) in nats, summed over all but the last axis; its gradient, to `answer` alone, is q - p."""

    @staticmethod
    def forward(ctx: Any, answer: Tensor, wanted: Tensor) -> Tensor:
        # fp16 has no room for small probabilities before the loss is scaled
        grad = torch.empty_like(answer, dtype=torch.float32 if answer.dtype == torch.float16 else None)
        rows = max(1, _AT_A_TIME.get(answer.device.type, 2**24) // answer.shape[-1])
        parts = zip(*(t.reshape(-1, t.shape[-1]).split(rows) for t in (answer, wanted, grad)), strict=True)
        total = torch.zeros((), device=answer.device)
        for answer_TC, wanted_TC, grad_TC in parts:
            log_q_TC, log_p_TC = answer_TC.float().log_softmax(-1), wanted_TC.float().log_softmax(-1)
            total += F.kl_div(log_q_TC, log_p_TC, log_target=True, reduction="sum")
            grad_TC.copy_(log_q_TC.exp() - log_p_TC.exp())
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad * scale.to(grad.dtype), None
