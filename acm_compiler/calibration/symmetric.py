"""Linear algebra on covariances, safe where they are singular: dead and duplicated features are no fault."""

from __future__ import annotations

import torch
from torch import Tensor

from acm_compiler.acm.precision import float64_device

_TINY = torch.finfo(torch.float64).tiny
# rows of a symmetric product that are computed at once, from the diagonal on
_ROWS = 256


class SymmetricSum:
    """A running sum [F, F] in float64 of products a^T b that are symmetric.

    Only what is on or above the diagonal is computed and added up, in rows of blocks: little more than half the work.
    """

    def __init__(self) -> None:
        self._upper_FF: Tensor | None = None

    def add(self, a_TF: Tensor, b_TF: Tensor) -> None:
        """Add a^T b, taken in the type of `a` and `b`."""
        if self._upper_FF is None:
            features, home = a_TF.shape[1], float64_device(a_TF.device)
            self._upper_FF = torch.zeros(features, features, dtype=torch.float64, device=home)
        for first in range(0, len(self._upper_FF), _ROWS):
            rows_RF = a_TF[:, first : first + _ROWS].T @ b_TF[:, first:]
            self._upper_FF[first : first + _ROWS, first:] += rows_RF.to(self._upper_FF.device)

    def value(self, features: int, home: torch.device) -> Tensor:
        """The sum; zeros, on `home`, where nothing was added."""
        if self._upper_FF is None:
            return torch.zeros(features, features, dtype=torch.float64, device=home)
        upper_FF = self._upper_FF.triu()
        return upper_FF + upper_FF.triu(1).T

    @property
    def is_finite(self) -> bool:
        """Whether everything on the diagonal is finite."""
        return self._upper_FF is None or bool(self._upper_FF.diagonal().isfinite().all())

    def replace(self, value_FF: Tensor) -> None:
        """Become this symmetric matrix."""
        self._upper_FF = value_FF


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


def square_factors(c_FF: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """R and R^-1 with R R^T = c plus `ridge` times its mean diagonal, c symmetric positive semi-definite.

    R is not symmetric, but for all that is invariant under rotations it does what the root c^1/2 does, with less work.
    """
    values, vectors = torch.linalg.eigh(c_FF)
    values = (values.clamp_min(0) + ridge * mean_diagonal(c_FF)).sqrt()
    return vectors * values, (vectors / values).T
