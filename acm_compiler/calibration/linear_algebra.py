"""Linear algebra of closed forms on covariances, which may be singular: dead and duplicated features are allowed.

F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY, _ROUNDING = torch.finfo(torch.float64).tiny, 1e-7


def mean_diagonal(c_FF: Tensor) -> Tensor:
    """Mean of the diagonal, a positive scalar also for a zero matrix."""
    return c_FF.diagonal().mean().clamp_min(_TINY)


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


def square_factors(c_FF: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """R and R^-1 with R R^T = c plus `ridge` times its mean diagonal, c symmetric positive semi-definite.

    R is not symmetric, but for all that is invariant under rotations it does what the root c^1/2 does, with less work.
    """
    same_FF = torch.eye(len(c_FF), dtype=c_FF.dtype, device=c_FF.device)
    root = cholesky(c_FF + ridge * mean_diagonal(c_FF) * same_FF)
    return root, torch.linalg.solve_triangular(root, same_FF, upper=False)
