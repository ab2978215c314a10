"""A linear site as learners without activation: nested low-rank factors of its weight (docs/semantics.md, Projections).

Shapes: D in, O out, R = N * width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.calibration.symmetric import mean_diagonal, square_factors

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
    c_root, c_inverse = square_factors(c_DD, _RIDGE_INPUT)
    g_root, g_inverse = square_factors(g_OO, _RIDGE_METRIC)
    u, s, vh = torch.linalg.svd(g_root.T @ w_OD @ c_root, full_matrices=False)
    found = min(rank, len(s))
    w_in, w_out = w_OD.new_zeros(rank, w_OD.shape[1]), w_OD.new_zeros(w_OD.shape[0], rank)
    w_in[:found] = vh[:found] @ c_inverse
    w_out[:, :found] = g_inverse.T @ (u * s)[:, :found]
    return Factors(w_in=w_in, w_out=w_out)


def metric_root(g_OO: Tensor) -> Tensor:
    """R^T [O, O] with R R^T = G; with the ridge that keeps directions no sampled gradient pointed in."""
    return square_factors(g_OO, _RIDGE_ORDER)[0].T


def prefix_biases(w_OD: Tensor, b_O: Tensor, mean_D: Tensor, factors: Factors, learners: int) -> Tensor:
    """The bias [N + 1, O] with which each prefix of learners has the mean output of the dense layer."""
    hidden_NH = (factors.w_in @ mean_D).unflatten(0, (learners, -1))
    explained_NO = torch.einsum("onh,nh->no", factors.w_out.unflatten(1, (learners, -1)), hidden_NH)
    prefixes = torch.cat([torch.zeros_like(explained_NO[:1]), explained_NO.cumsum(0)])
    return w_OD @ mean_D + b_O - prefixes
