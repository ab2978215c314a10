"""Linear algebra on covariances, safe where they are singular: dead and duplicated features are no fault."""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny


def mean_diagonal(c_FF: Tensor) -> Tensor:
    """Mean of the diagonal, a positive scalar also for a zero matrix."""
    return c_FF.diagonal().mean().clamp_min(_TINY)


def solve(a_FF: Tensor, b_FO: Tensor) -> Tensor:
    """a^-1 b for a symmetric positive semi-definite `a` in float64, by Cholesky.

    Where `a` is numerically singular, the least ridge of 1e-12, 1e-11, ... times its mean diagonal is added that lets
    the factorisation succeed.
    """
    factor, failed = torch.linalg.cholesky_ex(a_FF)
    ridge = 1e-12 * mean_diagonal(a_FF)
    while failed:
        factor, failed = torch.linalg.cholesky_ex(a_FF + ridge * torch.eye(len(a_FF), dtype=a_FF.dtype).to(a_FF))
        ridge = ridge * 10
    return torch.cholesky_solve(b_FO, factor)


def roots(c_FF: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """c^1/2 and c^-1/2 of a symmetric positive semi-definite matrix plus `ridge` times its mean diagonal."""
    values, vectors = torch.linalg.eigh(c_FF)
    values = (values.clamp_min(0) + ridge * mean_diagonal(c_FF)).sqrt()
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T
