"""The operators of a backward in graphs that Inductor compiles: launches, which it starts itself (`calls/traced`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import LearnersArguments, LearnerWeights, Weights
from acm_compiler.acm.gradients.operators import LEARNERS_BACKWARD, RELAXED, RELAXED_BACKWARD, learned
from acm_compiler.acm.gradients.sorted_tokens import chosen
from acm_compiler.codegen.gpu.calls.traced import (
    builds,
    decompose,
    empty,
    learners,
    machine_in_graphs,
    size,
    stays_whole,
)
from acm_compiler.codegen.gpu.gradients.launch import BackwardPlan, run_backward
from acm_compiler.codegen.gpu.gradients.operators import kind_of, reason_against
from acm_compiler.codegen.gpu.spec import spec_of
from acm_compiler.codegen.gpu.tiles import bucket_of


def register() -> None:
    """Decompose these operators, too, in graphs of CUDA tensors from now on."""
    decompose(RELAXED, _relaxed)
    decompose(LEARNERS_BACKWARD, _learners_backward)
    decompose(RELAXED_BACKWARD, _relaxed_backward)


def _relaxed(
    x: Tensor, nu: Tensor, *tensors: Any, k_min: int, form: str, act: str
) -> tuple[Tensor, Tensor, Tensor] | None:
    y = learners(x, chosen(nu, k_min), *LearnerWeights(*tensors), form=form, act=act)
    return None if y is None else (y, x.new_empty(0), x.new_empty(0))  # nothing is kept for the backward


def _learners_backward(dy: Tensor, x: Tensor, k: Tensor, *tensors: Any, form: str, act: str) -> list[Tensor] | None:
    call = LearnersArguments(x, k, *tensors)
    weights, names = Weights.of(call, form=form, act=act), ["x", *learned(call)]
    found = _launched(dy, x, k, weights, set(names), None)
    if found is None:
        return None
    found["residual"] = dy.clone()  # which the operators' rule does not read: no graph keeps it
    return [found[name] for name in names]


def _relaxed_backward(
    dy: Tensor,
    a: Tensor,
    up: Tensor,
    x: Tensor,
    nu: Tensor,
    *tensors: Any,
    k_min: int,
    form: str,
    act: str,
    wanted: list[str],
) -> list[Tensor] | None:
    weights = Weights(*tensors, act=act, form=form)
    found = _launched(dy, x, chosen(nu, k_min), weights, set(wanted), (nu.dtype, k_min))
    return None if found is None else [found[name] for name in wanted]


def _launched(
    dy: Tensor, x: Tensor, k: Tensor, weights: Weights, wanted: set[str], choice: tuple[torch.dtype, int] | None
) -> dict[str, Tensor] | None:
    """Gradients by launches; None where kernels do not cover the call, or Triton cannot build them."""
    if reason_against(x, weights) is not None:
        return None
    spec, machine, every = spec_of(x, weights, None), machine_in_graphs(x.device), choice is not None
    if stays_whole(spec, x):
        return None

    def build() -> None:
        own = weights.map(empty)
        row, of_y = empty(x, 1), empty(dy, 1)
        plan = BackwardPlan(spec, machine, bucket_of(x.shape[0]), every=every)
        plan(of_y, row, row.new_zeros(1, dtype=torch.int32), own, wanted, None)

    if not builds(kind_of(x, weights), (spec, machine, size(x), every, frozenset(wanted)), build):
        return None
    return run_backward(dy, x, k, weights, wanted=wanted, machine=machine, choice=choice)
