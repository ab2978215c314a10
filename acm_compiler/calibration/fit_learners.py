"""One site's learners in closed form, from its dense weights and what was seen of it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from acm_compiler.acm import Learners
from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import Weights
from acm_compiler.calibration.dense_weights import DenseWeights
from acm_compiler.calibration.low_rank import metric_root, nested_factors, prefix_biases
from acm_compiler.calibration.mlp_learners import Hidden, fit_second_layer
from acm_compiler.calibration.neuron_order import neuron_order, variance_order
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.passes.rewrite.build_acm import new_learners
from acm_compiler.planning.plan import PlannedSite
from acm_compiler.planning.planner import matched_width

# a refit from fewer tokens per hidden neuron is worse than none
ENOUGH_TOKENS = 2


def resolve_site(site: PlannedSite, tokens: int) -> PlannedSite:
    """`site` as it will be once calibrated on so many tokens: `auto` resolved, no refit from too few."""
    if site.kind == "linear":
        width = matched_width(site, site.learners) if site.is_sliced else site.width
        return dataclasses.replace(site, form="svd", width=width, state="learners")
    assert site.dense_width is not None
    too_few = tokens < ENOUGH_TOKENS * site.dense_width
    return dataclasses.replace(site, second_layer="original" if too_few else site.second_layer, state="learners")


@torch.no_grad()
def fit_learners(site: PlannedSite, dense: DenseWeights, record: SiteRecord) -> Weights:
    """The learners of a resolved `site`, in the type of `dense`."""
    return _fit_linear(site, dense, record) if site.kind == "linear" else _fit_mlp(site, dense, record)


def _fit_mlp(site: PlannedSite, dense: DenseWeights, record: SiteRecord) -> Weights:
    assert dense.last is not None
    w_OF, b_O = to_float64(dense.last[0]), _bias(dense.last)
    c_FF = record.moments.covariance
    # neurons are ordered by what they do to the model's output, refits are best in every metric at once
    weighted_OF = metric_root(record.metric.value(site.d_out, record.home)) @ w_OF
    moments = record.moments
    hidden = Hidden(tokens=moments.count, c_FF=c_FF, mean_F=moments.mean, w_OF=w_OF, b_O=b_O)
    if site.second_layer == "original":
        order = variance_order(c_FF, weighted_OF)
    else:
        # the order inside the last learner does not matter
        order = neuron_order(
            c_FF, weighted_OF, min(len(c_FF), (site.learners - (1 if _holds_all(site) else 0)) * site.width)
        )
    fit = fit_second_layer(hidden, order, site.second_layer, learners=site.learners, width=site.width)
    ins = [_split(weight, bias, order, site) for weight, bias in dense.first]
    (w_in, b_in), (w_up, b_up) = ins[0], ins[1] if len(ins) > 1 else (None, None)
    return Weights(
        w_in=w_in,
        b_in=b_in,
        w_up=w_up,
        b_up=b_up,
        w_out=fit.w_out.to(w_in),
        b_out=fit.b_out.to(w_in),
        w_top=None if fit.w_top is None else fit.w_top.to(w_in),
        act=site.learner_act,
        form="gated" if len(ins) > 1 else "mlp",
    )


def _holds_all(site: PlannedSite) -> bool:
    assert site.dense_width is not None
    return site.learners * site.width >= site.dense_width


def _split(w_FD: Tensor, b_F: Tensor | None, order: Tensor, site: PlannedSite) -> tuple[Tensor, Tensor | None]:
    """The first layer in the order of the learners: w [N, H, D], b [N, H] (None where no branch has one)."""
    order = order[: site.learners * site.width].to(w_FD.device)
    w = w_FD.new_zeros(site.learners * site.width, w_FD.shape[1])
    w[: len(order)] = w_FD[order]
    b = None
    if site.has_bias_in:
        b = w_FD.new_zeros(site.learners * site.width)
        if b_F is not None:
            b[: len(order)] = b_F[order]
        b = b.unflatten(0, (site.learners, site.width))
    return w.unflatten(0, (site.learners, site.width)), b


def _fit_linear(site: PlannedSite, dense: DenseWeights, record: SiteRecord) -> Weights:
    w_OD, b_O = to_float64(dense.first[0][0]), _bias(dense.first[0])
    metric = record.metric.value(site.d_out, record.home)
    factors = nested_factors(w_OD, record.inputs, metric, site.learners * site.width)
    b_out = prefix_biases(w_OD, b_O, record.moments.mean, factors, site.learners)
    if site.has_top:
        b_out[site.learners] = b_O
    like = dense.first[0][0]
    return Weights(
        w_in=factors.w_in.unflatten(0, (site.learners, site.width)).to(like),
        b_in=None,
        w_up=None,
        b_up=None,
        w_out=factors.w_out.unflatten(1, (site.learners, site.width)).to(like),
        b_out=b_out.to(like),
        w_top=w_OD.to(like) if site.has_top else None,
        act=site.learner_act,
        form="linear",
    )


def _bias(linear: tuple[Tensor, Tensor | None]) -> Tensor:
    weight, bias = linear
    return to_float64(weight.new_zeros(len(weight)) if bias is None else bias)


@torch.no_grad()
def as_module(weights: Weights, site: PlannedSite, like: Tensor) -> Learners:
    """`weights` as parameters on the device and in the type of `like`."""
    learners = new_learners(site, like=like)
    for name, parameter in learners.named_parameters():
        parameter.copy_(getattr(weights, name))
    return learners
