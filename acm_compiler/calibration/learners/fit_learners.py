"""Learners of one site in closed form, from its dense weights as matrices and the moments of its input.

A linear site gets nested low-rank factors of its weight. Shapes: D in, O out, R = N * width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.precision import to_float64
from acm_compiler.calibration.learners.mlp_learners import Hidden, fit_second_layer, neuron_order, variance_order
from acm_compiler.calibration.linear_algebra import mean_diagonal, missing_tokens, square_factors, usual_diagonal
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.planning.decisions import PlannedSite
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
def fit_learners(site: PlannedSite, dense: DenseWeights, record: SiteRecord) -> tuple[Weights, DenseWeights]:
    """The learners of a resolved `site`, in the type of `dense`, and `dense` with its neurons in their order."""
    return (_fit_linear(site, dense, record), dense) if site.kind == "linear" else _fit_mlp(site, dense, record)


def _fit_mlp(site: PlannedSite, dense: DenseWeights, record: SiteRecord) -> tuple[Weights, DenseWeights]:
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
    dense = dense.reordered(order.to(dense.device))
    ins = [_split(weight, bias, site) for weight, bias in dense.first]
    (w_in, b_in), (w_up, b_up) = ins[0], ins[1] if len(ins) > 1 else (None, None)
    weights = Weights(
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
    return weights, dense


def _holds_all(site: PlannedSite) -> bool:
    assert site.dense_width is not None
    return site.learners * site.width >= site.dense_width


def _split(w_FD: Tensor, b_F: Tensor | None, site: PlannedSite) -> tuple[Tensor, Tensor | None]:
    """The first layer, cut into learners: w [N, H, D], b [N, H] (None where no branch has one)."""
    held = site.learners * site.width
    w = w_FD.new_zeros(held, w_FD.shape[1])
    w[: len(w_FD)] = w_FD[:held]
    b = None
    if site.has_bias_in:
        b = w_FD.new_zeros(held)
        if b_F is not None:
            b[: len(b_F)] = b_F[:held]
        b = b.unflatten(0, (site.learners, site.width))
    return w.unflatten(0, (site.learners, site.width)), b


def _fit_linear(site: PlannedSite, dense: DenseWeights, record: SiteRecord) -> Weights:
    w_OD, b_O = to_float64(dense.first[0][0]), _bias(dense.first[0])
    metric = record.metric.value(site.d_out, record.home)
    c_DD = trusted(record.inputs, record.moments.count)
    factors = nested_factors(w_OD, c_DD, metric, site.learners * site.width)
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


# inputs that are imagined, in which features vary independently, for one that a covariance is missing
_IMAGINED = 0.03


def trusted(c_DD: Tensor, tokens: float) -> Tensor:
    """The covariance of inputs as far as so many tokens tell it: of few, correlations count for less.

    Where there are fewer than features, many directions have no variance at all, and would be given up for nothing.
    """
    return c_DD + torch.diag(_IMAGINED * missing_tokens(tokens, len(c_DD)) * c_DD.diagonal())


# a metric from a few hundred examples is noisy: of the ridges tried on MiniLM this one served held-out texts best
_RIDGE_INPUT, _RIDGE_METRIC, _RIDGE_ORDER = 1e-5, 0.3, 3e-2
_CONSTANT = 1e-12  # mean variance of an input that varies by rounding alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """W is about w_out[:, :r] @ w_in[:r] for every r; w_in [R, D], w_out [O, R]; zeros beyond the rank of W."""

    w_in: Tensor
    w_out: Tensor


def nested_factors(w_OD: Tensor, c_DD: Tensor, g_OO: Tensor, rank: int) -> Factors:
    """The factors that for every r minimise E[d^T G d], d = (W - w_out[:, :r] w_in[:r]) (x - mean), all float64.

    `c_DD` is the covariance of the input, `g_OO` the metric of the output. It is the truncated SVD of
    R_g^T W R_c with R_g R_g^T = G and R_c R_c^T = C, taken back to the original coordinates.
    """
    if mean_diagonal(c_DD) < _CONSTANT:  # the bias explains it, and W's own factors have a sensible size
        c_DD = torch.eye(len(c_DD)).to(c_DD)
    c_root, c_inverse = square_factors(c_DD, _RIDGE_INPUT * usual_diagonal(c_DD))
    g_root, g_inverse = square_factors(g_OO, _RIDGE_METRIC * mean_diagonal(g_OO))
    whitened_OD = g_root.T @ w_OD @ c_root
    # the right singular vectors alone are needed, and far below the largest singular value none of them exactly
    right_DD = torch.linalg.eigh(whitened_OD.T @ whitened_OD).eigenvectors.flip(1)
    found = min(rank, *w_OD.shape)
    w_in, w_out = w_OD.new_zeros(rank, w_OD.shape[1]), w_OD.new_zeros(w_OD.shape[0], rank)
    w_in[:found] = right_DD[:, :found].T @ c_inverse
    w_out[:, :found] = g_inverse.T @ (whitened_OD @ right_DD[:, :found])
    return Factors(w_in=w_in, w_out=w_out)


def metric_root(g_OO: Tensor) -> Tensor:
    """R^T [O, O] with R R^T = G; with the ridge that keeps directions no sampled gradient pointed in."""
    return square_factors(g_OO, _RIDGE_ORDER * mean_diagonal(g_OO))[0].T


def prefix_biases(w_OD: Tensor, b_O: Tensor, mean_D: Tensor, factors: Factors, learners: int) -> Tensor:
    """The bias [N + 1, O] with which each prefix of learners has the mean output of the dense layer."""
    hidden_NH = (factors.w_in @ mean_D).unflatten(0, (learners, -1))
    explained_NO = torch.einsum("onh,nh->no", factors.w_out.unflatten(1, (learners, -1)), hidden_NH)
    prefixes = torch.cat([torch.zeros_like(explained_NO[:1]), explained_NO.cumsum(0)])
    return w_OD @ mean_D + b_O - prefixes
