"""Learners of an MLP trained on inputs of their own site, from the closed form on: first layers move, too.

The dense MLP is the teacher, so neither labels nor the rest of the model are needed. All k have as many tokens of a
step, and an error d = y_k - o counts by d^T G d, the metric of expected damage. Errors of small k are many times those
of large k, and budgets use all of them: each k counts by its damage before the first step to a negative power.
Shapes: T tokens, S of them to learn from, D in, O out, N learners of H, R rank of the metric.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.precision import is_fast_in_bfloat16, to_float64
from acm_compiler.acm.reference import hidden
from acm_compiler.calibration.damage import Judged, errors_of_k
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.recipe.phases import half_cosine

# tokens of a step, and how far Adam moves a weight in one, as a part of the root mean square of its matrix
_BATCH, _RATE, _WARM_UP, _BETAS = 1024, 0.01, 20, (0.9, 0.99)
# the part of the way from the closed form that is kept: so few steps end in noise, which harms large k the most
_KEPT = 0.85
# a k counts by its damage to the power of -_EVEN; damages below a part of that without learners are as good as none
_EVEN, _FLOOR = 0.75, 1e-3
# one token of so many judges whether training helped
_HELD_OUT = 8
# tokens at once where all k are computed beside each other, and where nothing but the dense outputs is
_BLOCK, _DENSE_BLOCK = 512, 4096
_TRAINED = ("w_in", "b_in", "w_up", "b_up", "w_out", "b_out")


def can_be_trained(weights: Weights, dense: DenseWeights) -> bool:
    """True for learners of an MLP that share one second layer; others keep the dense neurons for an exact k = N."""
    return dense.last is not None and weights.is_nested


def train_locally(weights: Weights, judged: Judged, x_TD: Tensor, *, steps: int, seed: int) -> Weights:
    """`weights` after `steps` on inputs `x_TD` of the site; as they were, unless that lowers damage held out.

    judged: the dense MLP that they imitate, its neurons in their order, and the metric.
    """
    own_T = torch.arange(len(x_TD), device=x_TD.device) % _HELD_OUT != 0
    shown_S, judge_TD = own_T.nonzero().squeeze(1), x_TD[~own_T].to(weights.w_in.dtype)
    if not len(shown_S) or not steps:
        return weights
    before_C = mean_damages(weights, judged, judge_TD)
    weight_C = (before_C + _FLOOR * before_C[0]).clamp_min(torch.finfo(before_C.dtype).tiny) ** -_EVEN
    with torch.enable_grad():
        trained = _train(weights, judged, x_TD, shown_S, weight_C / weight_C[1:].mean(), steps=steps, seed=seed)
    after_C = mean_damages(trained, judged, judge_TD)
    return trained if bool((weight_C * (after_C - before_C))[1:].sum() < 0) else weights


@torch.no_grad()
def mean_damages(weights: Weights, judged: Judged, x_TD: Tensor) -> Tensor:
    """Mean of d^T G d / tr G over tokens for every k from 0 to N, float64."""
    errors = errors_of_k(weights, judged.dense, judged.root)
    blocks = (errors(part_TD, 0) for part_TD in x_TD.split(_BLOCK))
    return torch.stack([to_float64(d_CTR).square().sum((1, 2)) for d_CTR in blocks]).sum(0) / len(x_TD)


def _train(
    weights: Weights, judged: Judged, x_TD: Tensor, shown_S: Tensor, weight_C: Tensor, *, steps: int, seed: int
) -> Weights:
    """Weights after the steps, which see the tokens `shown_S` [S] of `x_TD`."""
    root_RO = judged.root.T.to(weights.w_in)
    dtype = root_RO.dtype
    wanted_SR = root_RO.new_empty(len(shown_S), len(root_RO))
    for rows, wanted in zip(shown_S.split(_DENSE_BLOCK), wanted_SR.split(_DENSE_BLOCK), strict=True):
        wanted.copy_(_through(judged.dense, x_TD[rows].to(dtype), root_RO))
    student = replace(weights, **{name: t.clone().requires_grad_() for name, t in _trained(weights).items()})
    moved = list(_trained(student).values())
    rates = [_RATE * float(tensor.detach().square().mean().sqrt()) for tensor in moved]
    optimizer = torch.optim.Adam(
        [{"params": [tensor], "lr": rate} for tensor, rate in zip(moved, rates, strict=True)],
        betas=_BETAS,
        fused=x_TD.device.type in ("cpu", "cuda"),
    )
    generator, fast = torch.Generator().manual_seed(seed), is_fast_in_bfloat16(x_TD.device)
    k_T = weights.learners - torch.arange(_BATCH, device=x_TD.device) * weights.learners // _BATCH
    width, weight_T = weights.w_in.shape[1], weight_C.to(root_RO)[k_T]
    runs_TR = torch.arange(width * weights.learners, device=x_TD.device) < width * k_T[:, None]
    runs_TR = runs_TR.to(torch.bfloat16 if fast else dtype)
    for step in range(steps):
        pace = min(1.0, (step + 1) / _WARM_UP) * half_cosine(step, steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * pace
        rows = torch.randint(len(shown_S), (_BATCH,), generator=generator, device="cpu").to(x_TD.device)
        with torch.autocast(x_TD.device.type, torch.bfloat16, enabled=fast):
            y_TR = _prefixes(student, x_TD[shown_S[rows]].to(dtype), k_T, runs_TR, root_RO)
        d_TR = y_TR.to(dtype) - wanted_SR[rows]
        optimizer.zero_grad()
        (d_TR.square().sum(1) * weight_T).mean().backward()
        optimizer.step()
    ends = _trained(student)
    return replace(weights, **{name: t.lerp(ends[name].detach(), _KEPT) for name, t in _trained(weights).items()})


def _trained(weights: Weights) -> dict[str, Any]:
    """Tensors that training moves, by name."""
    return {name: tensor for name in _TRAINED if (tensor := getattr(weights, name)) is not None}


@torch.no_grad()
def _through(dense: DenseWeights, x_TD: Tensor, root_RO: Tensor) -> Tensor:
    assert dense.last is not None
    return F.linear(F.linear(dense.hidden(x_TD), *dense.last), root_RO)


def _prefixes(weights: Weights, x_TD: Tensor, k_T: Tensor, runs_TR: Tensor, root_RO: Tensor) -> Tensor:
    """R^T y_k for tokens that each run a k of their own, whose neurons are 1 in `runs_TR`, others 0: [T, R]."""
    assert weights.w_out is not None
    h_TR = hidden(x_TD, weights, weights.learners)
    y_TO = F.linear(h_TR * runs_TR, weights.w_out.flatten(1)) + weights.b_out[k_T]
    return F.linear(y_TO, root_RO)
