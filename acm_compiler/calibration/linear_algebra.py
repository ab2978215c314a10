"""Linear algebra of closed forms on covariances, which may be singular: dead and duplicated features are allowed.

F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY, _ROUNDING = torch.finfo(torch.float64).tiny, 1e-7
# tokens for every feature that tell a covariance well enough
_PLENTY = 10
# features are as large as most are up to a factor; where nearly all are dead, this part of their mean still counts
_LOUDEST, _USUAL, _LEAST = 100.0, 0.9, 1e-6


def mean_diagonal(c_FF: Tensor) -> Tensor:
    """Mean of the diagonal, a positive scalar also for a zero matrix."""
    return c_FF.diagonal().mean().clamp_min(_TINY)


def usual_diagonal(c_FF: Tensor) -> Tensor:
    """Mean of the diagonal, of what is far above nine tenths of it no more than a hundred times that.

    A ridge is a part of it. A few features that are thousands of times as large as all others, as language models have,
    would make one of their mean so large that it buries the others.
    """
    diagonal_F = c_FF.diagonal()
    usual = diagonal_F.minimum(_LOUDEST * diagonal_F.quantile(_USUAL)).mean()
    return torch.maximum(usual, _LEAST * mean_diagonal(c_FF))


def missing_tokens(tokens: float, features: int) -> float:
    """Tokens that are missing to ten per feature, as a part of those that there are."""
    return max(0.0, _PLENTY * features - tokens) / tokens


def solve(a_FF: Tensor, b_FO: Tensor) -> Tensor:
    """a^-1 b for a symmetric positive semi-definite `a` in float64, see `cholesky`."""
    return torch.cholesky_solve(b_FO, cholesky(a_FF))


def cholesky(a_FF: Tensor) -> Tensor:
    """Lower L with L L^T = a, of a symmetric positive semi-definite matrix in float64.

    Where `a` is numerically singular, the least ridge of 1e-12, 1e-11, ... times its mean diagonal is added that lets
    the factorisation succeed.
    """
    factor, failed = torch.linalg.cholesky_ex(a_FF)
    ridge = 1e-12 * mean_diagonal(a_FF)
    while failed:
        factor, failed = torch.linalg.cholesky_ex(a_FF + ridge * torch.eye(len(a_FF), dtype=a_FF.dtype).to(a_FF))
        ridge = ridge * 10
    return factor


def thin_factors(c_FF: Tensor) -> tuple[Tensor, Tensor]:
    """R [F, rank] and its left inverse with R R^T = c, without directions in which `c`, summed in fp32, is rounding."""
    values, vectors = torch.linalg.eigh(c_FF)
    large = values > _ROUNDING * values[-1]
    values, vectors = values[large].sqrt(), vectors[:, large]
    return vectors * values, (vectors / values).T


def square_factors(c_FF: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """R and R^-1 with R R^T = c plus a ridge, c symmetric positive semi-definite.

    R is not symmetric, but for all that is invariant under rotations it does what the root c^1/2 does, with less work.
    """
    same_FF = torch.eye(len(c_FF), dtype=c_FF.dtype, device=c_FF.device)
    root = cholesky(c_FF + ridge * same_FF)
    return root, torch.linalg.solve_triangular(root, same_FF, upper=False)
