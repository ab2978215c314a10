"""The operators of ACMs in plain torch that computes what tokens run, for graphs of standard operators alone.

Sorted by k, the most first, tokens that run k learners are neighbours, and those that run learner n are the first rows.
How many they are is a size that depends on values. Shapes: see `acm.reference`; c[k] is the number of tokens that run k
learners or more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import LearnersArguments, LearnerWeights, part
from acm_compiler.acm.ops import GATE, LEARNERS, as_gate
from acm_compiler.acm.reference import Weights, hidden, prefix_output


def as_learners(x: Tensor, *tensors: Any, form: str, act: str) -> Tensor:
    """Run `acm::learners`."""
    call = LearnersArguments(x, *tensors)
    y = prefixes_output(call.x, call.k, Weights(*part(LearnerWeights, call), act=act, form=form))
    return y if call.residual is None else y + call.residual


OPERATORS: dict[Any, Callable[..., Any]] = {LEARNERS.default: as_learners, GATE.default: as_gate}
"""Substitutes for the operators of ACMs, by operator."""


def prefixes_output(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """y_{k(t)}(x_t) [T, O], as `reference.run_learners`, in one graph for all k."""
    order_T, c = k_T.argsort(descending=True), _counts(k_T, weights.learners)
    run = _by_learner if weights.is_nested else _by_k
    return run(x_TD.index_select(0, order_T), c, weights).index_select(0, order_T.argsort())


def _counts(k_T: Tensor, learners: int) -> list[Any]:
    """c[k] for k from 0 to N + 1: the number of tokens that run k learners or more."""
    runs_TN = k_T[:, None] > torch.arange(learners, device=k_T.device)
    c: list[Any] = [k_T.shape[0]]
    for count in runs_TN.sum(0).unbind():
        c.append(count.item())
        torch._check(c[-1] >= 0)
        torch._check(c[-1] <= c[-2])
    return [*c, 0]


def _by_k(xs_TD: Tensor, c: list[Any], weights: Weights) -> Tensor:
    """Sorted outputs, of all tokens that run k learners at once."""
    return torch.cat([prefix_output(xs_TD[c[k + 1] : c[k]], weights, k) for k in range(weights.learners, -1, -1)])


def _by_learner(xs_TD: Tensor, c: list[Any], weights: Weights) -> Tensor:
    """Sorted outputs, of all tokens that run a learner at once: each weight is read once, and kept once."""
    assert weights.w_out is not None
    total = xs_TD.new_empty(0, weights.b_out.shape[1])
    for k in range(weights.learners, 0, -1):
        one = {name: getattr(weights, name) for name in ("w_in", "b_in", "w_up", "b_up")}
        one = {name: None if tensor is None else tensor[k - 1 : k] for name, tensor in one.items()}
        total = _begin(total, c, weights, k)
        total = torch.addmm(total, hidden(xs_TD[: c[k]], replace(weights, **one), 1), weights.w_out[:, k - 1].T)
    return _begin(total, c, weights, 0)


def _begin(total: Tensor, c: list[Any], weights: Weights, k: int) -> Tensor:
    """The sums of tokens that run more than k learners, and the biases of those that run k."""
    return torch.cat([total, weights.b_out[k].expand(c[k] - c[k + 1], -1)])
