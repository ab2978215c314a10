"""Rounding of rows to 4 bits by what they multiply: an error is made up for by the numbers that are rounded after it.

A row w of a weight is multiplied by vectors of second moment C: rounded to v it errs by (w - v) C (w - v)^T. That is
made small, not w - v itself (docs/semantics.md, Int4 learners).
Shapes: R rows, C columns, which lie in groups; all float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from acm_compiler.acm.quantized.int4 import GROUP, Grids, whole_range
from acm_compiler.calibration.linear_algebra import cholesky, mean_diagonal

# ridge, as a part of the moments' mean diagonal: few tokens estimate correlations poorly
_DAMPING = 0.01
# passes of coordinate descent after GPTQ
_SWEEPS = 3
# parts of a group's range, below and above its middle, that are tried
_RANGES = (1.0, 0.92, 0.84)
_TINY = torch.finfo(torch.float64).tiny
# a ridge for moments that are zero, as of an input that never varies: its inverse is a number, too
_LEAST = 1e-100


@dataclass(slots=True, kw_only=True)
class Rounded:
    """Integers q [R, C] and the grids [R, groups] of their groups, columns `bounds` of each."""

    q: Tensor
    grids: Grids
    bounds: list[tuple[int, int]]

    @property
    def floats(self) -> Tensor:
        """The dequantised rows, [R, C]."""
        parts = [self._grid(at).floats(self.q[:, a:b]) for at, (a, b) in enumerate(self.bounds)]
        return torch.cat(parts, 1)

    def _grid(self, at: int) -> Grids:
        return Grids(*(t[:, at] for t in self.grids))


def damped(c_CC: Tensor, *, rounding: float = 0.0) -> Tensor:
    """The moments with a hundredth of their mean diagonal added to it, so that they can be inverted.

    rounding: by so much may they be wrong; no less is added.
    A part of each column's own, in place of it, keeps the largest columns from being made up for.
    """
    ridge = max(float(_DAMPING * mean_diagonal(c_CC)), rounding, _LEAST)
    ridge_C = torch.full_like(c_CC.diagonal(), ridge)
    return c_CC + torch.diag(ridge_C)


def error(w_RC: Tensor, rounded: Rounded, c_CC: Tensor) -> Tensor:
    """(w - v) C (w - v)^T of each row, [R]."""
    off_RC = w_RC - rounded.floats
    return torch.linalg.vecdot(off_RC @ c_CC, off_RC)


def round_rows(w_RC: Tensor, c_CC: Tensor, *, parts: int = 1) -> Rounded:
    """Round rows whose columns lie in so many equal parts with groups of their own, by moments that can be inverted.

    Columns are rounded in their order, and what each errs by is taken from those after it as far as the moments say
    (GPTQ, arXiv 2210.17323); then every integer, and every group's scale and least value, is chosen anew beside all
    others, a few times. A row never errs by more than one rounded to nearest.
    """
    bounds = _bounds(w_RC.shape[1], parts)
    best = _nearest(w_RC, bounds)
    made = _in_order(w_RC, c_CC, bounds)
    for _ in range(_SWEEPS):
        _sweep(w_RC, made, c_CC)
    worse_R = error(w_RC, made, c_CC) > error(w_RC, best, c_CC)
    made.q[worse_R] = best.q[worse_R]
    for ours, nearest in zip(made.grids, best.grids, strict=True):
        ours[worse_R] = nearest[worse_R]
    return made


def _bounds(columns: int, parts: int) -> list[tuple[int, int]]:
    """First column of each group, and the one after its last."""
    length = columns // parts
    firsts = [(part * length, at) for part in range(parts) for at in range(0, length, GROUP)]
    return [(start + at, start + min(at + GROUP, length)) for start, at in firsts]


def _nearest(w_RC: Tensor, bounds: list[tuple[int, int]]) -> Rounded:
    grids = [whole_range(w_RC[:, a:b].amin(1), w_RC[:, a:b].amax(1)) for a, b in bounds]
    q = [grid.nearest(w_RC[:, a:b]) for grid, (a, b) in zip(grids, bounds, strict=True)]
    return Rounded(q=torch.cat(q, 1), grids=_side_by_side(grids), bounds=bounds)


def _side_by_side(grids: list[Grids]) -> Grids:
    return Grids(*(torch.stack(kind, 1) for kind in zip(*grids, strict=True)))


def _in_order(w_RC: Tensor, c_CC: Tensor, bounds: list[tuple[int, int]]) -> Rounded:
    """GPTQ: with U^T U = C^-1, U upper, an error e of column j takes e U[j, i] / U[j, j] from every column i after it.

    A group's grid is chosen when its first column is reached: of what is left of the weight then.
    """
    u_CC = cholesky(torch.cholesky_inverse(cholesky(c_CC))).T.contiguous()
    left_RC, grids, q = w_RC.clone(), [], []
    for a, b in bounds:
        group_RG = left_RC[:, a:b]
        grid = _best_grid(group_RG, c_CC.diagonal()[a:b])
        errors_RG = torch.empty_like(group_RG)
        for j in range(b - a):
            column_R1 = group_RG[:, j : j + 1]
            q.append(grid.nearest(column_R1))
            errors_RG[:, j : j + 1] = (column_R1 - grid.floats(q[-1])) / u_CC[a + j, a + j]
            group_RG[:, j:] -= errors_RG[:, j : j + 1] * u_CC[a + j, a + j : b]
        left_RC[:, b:] -= errors_RG @ u_CC[a:b, b:]
        grids.append(grid)
    return Rounded(q=torch.cat(q, 1), grids=_side_by_side(grids), bounds=bounds)


def _best_grid(w_RG: Tensor, weight_G: Tensor) -> Grids:
    """Lay 16 steps over that part of each row's range whose nearest numbers err least, squares weighed by column."""
    low_R, high_R = w_RG.amin(1), w_RG.amax(1)
    middle_R = (low_R + high_R) / 2
    best, least_R = whole_range(low_R, high_R), torch.full_like(low_R, torch.inf)
    for below, above in product(_RANGES, repeat=2):
        grid = whole_range(torch.lerp(middle_R, low_R, below), torch.lerp(middle_R, high_R, above))
        error_R = (grid.floats(grid.nearest(w_RG)) - w_RG).square() @ weight_G
        better_R = error_R < least_R
        best = Grids(*(torch.where(better_R, new, kept) for new, kept in zip(grid, best, strict=True)))
        least_R = torch.where(better_R, error_R, least_R)
    return best


def _sweep(w_RC: Tensor, made: Rounded, c_CC: Tensor) -> None:
    """Choose every integer anew, and every group's grid, each the best beside all others as they are; in place.

    With D = (w - v) C, an integer's number moved by d changes the error by d^2 C[j, j] - 2 d D[j].
    """
    v_RC = made.floats
    d_RC = (w_RC - v_RC) @ c_CC
    for at, (a, b) in enumerate(made.bounds):
        grid, c_GG = made._grid(at), c_CC[a:b, a:b]
        v_RG, d_RG, before_RG = v_RC[:, a:b], d_RC[:, a:b].clone(), v_RC[:, a:b].clone()
        for j in range(b - a):
            wanted_R1 = v_RG[:, j : j + 1] + d_RG[:, j : j + 1] / c_GG[j, j]
            q_R1 = grid.nearest(wanted_R1)
            moved_R1 = grid.floats(q_R1) - v_RG[:, j : j + 1]
            made.q[:, a + j : a + j + 1] = q_R1
            v_RG[:, j : j + 1] += moved_R1
            d_RG -= moved_R1 * c_GG[j]
        _refit_grid(made, at, v_RG, d_RG, c_GG)
        d_RC -= (v_RG - before_RG) @ c_CC[a:b]


def _refit_grid(made: Rounded, at: int, v_RG: Tensor, d_RG: Tensor, c_GG: Tensor) -> None:
    """Move a group's scale and least value to the least squares of its integers, of rows that gain; in place.

    With rows B of q and of ones, the change x of both solves B C B^T x = B D.
    """
    a, b = made.bounds[at]
    q_RG = made.q[:, a:b]
    basis_R2G = torch.stack([q_RG, torch.ones_like(q_RG)], 1)
    a_R22 = basis_R2G @ c_GG @ basis_R2G.mT
    ridge_R = 1e-9 * a_R22.diagonal(dim1=1, dim2=2).mean(1) + _TINY
    a_R22 = a_R22 + ridge_R[:, None, None] * torch.eye(2, dtype=a_R22.dtype, device=a_R22.device)
    change_R2 = torch.linalg.solve(a_R22, (basis_R2G @ d_RG[..., None]).squeeze(-1))
    former = made._grid(at)
    grid = Grids(*((t + change_R2[:, i]).half().double() for i, t in enumerate(former)))
    moved_RG = grid.floats(q_RG) - v_RG
    gain_R = torch.linalg.vecdot(2 * d_RG - moved_RG @ c_GG, moved_RG)
    gains_R = (gain_R > 0) & (grid.scale > 0) & grid.least.isfinite() & grid.scale.isfinite()
    for kept, new in zip(made.grids, grid, strict=True):
        kept[:, at] = torch.where(gains_R, new, kept[:, at])
    v_RG += torch.where(gains_R[:, None], moved_RG, 0.0)
