"""PlannedSite -> ACM: sizes from the plan, starting weights from the dense model (docs/semantics.md, The start)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM, Gate, Learners
from acm_compiler.acm.arguments import Weights
from acm_compiler.passes.rewrite.dense_region import dense_linear, packed_linear
from acm_compiler.passes.rewrite.offload import kept
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.planning.decisions import PlannedSite


def new_learners(site: PlannedSite, *, like: Tensor) -> Learners:
    """The learners that `site` plans, all zero, on the device and in the type of `like`."""
    return Learners(
        site.d_in,
        site.d_out,
        site.learners,
        site.width,
        form=site.learner_form,
        act=site.learner_act,
        bias_in=site.has_bias_in,
        per_k=site.second_layer == "per_k",
        top=site.has_top,
        heads=site.pair.heads if site.pair else 1,
        device=like.device,
        dtype=like.dtype,
    )


@torch.no_grad()
def fitted_learners(site: PlannedSite, weights: Weights, *, like: Tensor) -> Learners:
    """The learners that `site` plans with these weights, on the device and in the type of `like`."""
    learners = new_learners(site, like=like)
    for name, parameter in learners.named_parameters():
        parameter.copy_(getattr(weights, name))
    return kept(learners)


def build_acm(site: PlannedSite, *, like: Tensor, unit: float, cls: type[ACM] = ACM) -> ACM:
    """The ACM (a `cls`) that `site` plans, on the device and in the type of `like`, its learners all zero.

    `unit` is `cost.learner_unit` of the plan. It runs all learners until told otherwise.
    """
    acm = cls(
        Gate(site.d_in, site.gate_width, site.columns, device=like.device, dtype=like.dtype),
        new_learners(site, like=like),
        name=site.name,
        k_min=site.k_min,
        layout=site.layout,
        cost=macs_per_learner(site) / unit,
        dropout=site.graft.dropout,
    )
    mark_initialized(acm)
    return acm


@torch.no_grad()
def start(acm: ACM, site: PlannedSite, tensors: Mapping[str, Tensor]) -> None:
    """Fill a new ACM's learners from the dense weights and set its state.

    MLPs run their split; linear sites run their dense region until a phase has fitted the learners, which
    start at random around the dense bias. `init` "random" is the paper's start, whatever the kind.
    """
    learners = acm.learners
    if site.init == "auto" and site.last is not None:
        first = [dense_linear(ref, tensors) for ref in site.first]
        learners.start_split(first, dense_linear(site.last, tensors))
        return
    learners.start_random()
    if site.last is not None:
        if learners.w_top is not None and learners.w_out is not None:
            learners.w_top.copy_(learners.w_out.flatten(1))
        return
    weight, bias = packed_linear(site.first, tensors)
    if learners.w_top is not None:
        learners.w_top.copy_(weight)
    if site.init == "auto":
        acm.state = "dense"
        if bias is not None:
            learners.b_out.copy_(bias)


def make_like(part: nn.Module, before: nn.Module) -> None:
    """Let a new part of an ACM train and have gradients if the one before it did."""
    part.train(before.training)
    part.requires_grad_(any(parameter.requires_grad for parameter in before.parameters()))
    mark_initialized(part)


def mark_initialized(module: nn.Module) -> None:
    """Tell transformers that these weights have their values: its `init_weights()` would draw new ones."""
    parts: list[Any] = [*module.modules(), *module.parameters()]
    for part in parts:
        part._is_hf_initialized = True
