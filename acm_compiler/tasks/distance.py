"""How far one model's answers are from another's.

Shapes: B examples, ... tokens or frames if there are any, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.tasks.base import Task


def distance(task: Task, answer: Tensor, wanted: Tensor) -> Tensor:
    """The distance of `answer` from `wanted`, both as `task.answer` gives them; a scalar with its graph, in fp32.

    Where a task answers in logits [B, ..., C]: KL(wanted || answer) in nats, the mean over tokens that are no padding.
    Else |answer - wanted|^2 / |wanted|^2: for vectors of length 1 twice 1 - cosine.
    """
    answer, wanted = answer.float(), wanted.detach().float()
    if not getattr(task, "answers_logits", False):
        return (answer - wanted).square().sum() / wanted.square().sum().clamp_min(torch.finfo(wanted.dtype).tiny)
    # where an answer is 0 throughout there is no token, and nothing adds up
    tokens = (wanted != 0).any(-1).sum().clamp_min(1)
    return F.kl_div(answer.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum") / tokens
