"""How far every prefix of an ACM's learners is from the output it stands for: what distill and gate look at.

Shapes: T tokens, D in, O out, N learners, H learner width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.reference import Weights, hidden, prefix_output


def prefix_errors(
    x_TD: Tensor, o_TO: Tensor, weights: Weights, k_min: int, *, last_only: bool = False
) -> Iterator[Tensor]:
    """y_k(x) - o [T, O] for k from k_min to N, in fp32 at least.

    `last_only`: gradients of each reach the last learner of its prefix and what belongs to that k alone.
    """
    o_TO = o_TO.to(torch.promote_types(o_TO.dtype, torch.float32))
    if not weights.is_nested:
        for k in range(k_min, weights.learners + 1):
            yield prefix_output(x_TD, _last_alone(weights, k) if last_only else weights, k) - o_TO
    else:
        yield from _running_errors(x_TD, o_TO, weights, k_min, last_only=last_only)


def _running_errors(x_TD: Tensor, o_TO: Tensor, weights: Weights, k_min: int, *, last_only: bool) -> Iterator[Tensor]:
    """The same where prefixes share one second layer: one learner's output is added at a time."""
    assert weights.w_out is not None
    h_TNH = hidden(x_TD, weights, weights.learners).unflatten(-1, weights.w_in.shape[:2])
    sum_TO = -o_TO
    if k_min == 0:
        yield sum_TO + weights.b_out[0]
    parts = zip(h_TNH.unbind(1), weights.w_out.unbind(1), weights.b_out[1:].unbind(), strict=True)
    for k, (h_TH, w_OH, b_O) in enumerate(parts, start=1):
        sum_TO = (sum_TO.detach() if last_only else sum_TO) + F.linear(h_TH, w_OH)
        if k >= k_min:
            yield sum_TO + b_O


def _last_alone(weights: Weights, k: int) -> Weights:
    """The same weights, of which the prefix k trains learner k - 1 and what belongs to that k alone."""
    last = max(k - 1, 0)

    def only_last(w: Tensor) -> Tensor:
        return torch.cat([w[:last].detach(), w[last : last + 1], w[last + 1 :].detach()])

    def only_last_if(w: Tensor | None) -> Tensor | None:
        return None if w is None else only_last(w)

    w_out = weights.w_out
    return replace(
        weights,
        w_in=only_last(weights.w_in),
        b_in=only_last_if(weights.b_in),
        w_up=only_last_if(weights.w_up),
        b_up=only_last_if(weights.b_up),
        w_out=w_out if w_out is None or w_out.dim() == 4 else only_last(w_out.movedim(1, 0)).movedim(0, 1),
    )
