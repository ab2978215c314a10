"""In which order an MLP's hidden neurons become learners: the first `width` are learner 0, and so on.

Shapes: F hidden neurons, O targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acm_compiler.calibration.symmetric import mean_diagonal

RIDGE = 1e-4
_PICKS, _CANDIDATES = 16, 48
# the greedy order takes about F^3 multiply-adds; beyond this width on this kind of device it is not worth the wait
_WIDEST = {"cpu": 8192, "cuda": 32768}


def neuron_order(c_FF: Tensor, w_OF: Tensor, count: int) -> Tensor:
    """All neurons, best first: the first `count` by greedy selection, or all by variance in a very wide layer."""
    if c_FF.shape[0] > _WIDEST[c_FF.device.type]:
        return variance_order(c_FF, w_OF)
    return greedy_order(c_FF, w_OF, count)


def variance_order(c_FF: Tensor, w_OF: Tensor) -> Tensor:
    """Neurons by the variance that each contributes to the output, E[(h - mean)^2] |w|^2."""
    return (c_FF.diagonal() * w_OF.square().sum(0)).argsort(descending=True, stable=True)


def greedy_order(c_FF: Tensor, w_OF: Tensor, count: int) -> Tensor:
    """Neurons in the order of forward selection: each next one lowers the refitted error of y = w h the most.

    The error is that of a ridge regression of y on the neurons picked so far. `c_FF` is the covariance of h. The first
    `count` are selected, the rest follow by variance. Picks are made in blocks: the best candidates by their present
    gain, then one after the other among those, exactly.
    """
    ridge = RIDGE * mean_diagonal(c_FF)
    state = _Selection(c_FF, w_OF, ridge, count)
    while state.picked < count:
        state.pick_block()
    chosen = torch.zeros(len(c_FF), dtype=torch.bool, device=c_FF.device)
    first = torch.tensor(state.order, dtype=torch.long, device=c_FF.device)
    chosen[first] = True
    rest = variance_order(c_FF, w_OF)
    return torch.cat([first, rest[~chosen[rest]]])


class _Selection:
    """Covariances that are left once the picked neurons explain what they can.

    Of the covariance of the neurons only the diagonal is kept up to date; columns of it follow from a growing
    Cholesky factor when they are asked for.
    """

    def __init__(self, c_FF: Tensor, w_OF: Tensor, ridge: Tensor, count: int) -> None:
        self.c_FF, self.ridge, self.count = c_FF, ridge, count
        self.order: list[int] = []
        self.diagonal_F = c_FF.diagonal() + ridge
        self.cross_FO = c_FF @ w_OF.T
        self.factor_FP = c_FF.new_zeros(len(c_FF), count)
        self.free_F = torch.ones(len(c_FF), dtype=torch.bool, device=c_FF.device)

    @property
    def picked(self) -> int:
        """How many neurons are picked."""
        return len(self.order)

    def pick_block(self) -> None:
        """Pick the next neurons and remove what they explain."""
        gain_F = self.cross_FO.square().sum(1) / self.diagonal_F
        gain_F = torch.where(self.free_F, gain_F, -1.0)
        free = len(gain_F) - self.picked
        candidates = gain_F.topk(min(_CANDIDATES, free)).indices
        columns_FM = self._columns(candidates)
        wanted = min(_PICKS, self.count - self.picked, free)
        chosen = _greedy_few(columns_FM[candidates], self.cross_FO[candidates], wanted)
        picks = candidates[chosen]
        lower = torch.linalg.cholesky(columns_FM[picks][:, chosen])
        block_FP = torch.linalg.solve_triangular(lower, columns_FM[:, chosen].T, upper=False).T
        explained_PO = torch.linalg.solve_triangular(lower, self.cross_FO[picks], upper=False)
        self.factor_FP[:, self.picked : self.picked + wanted] = block_FP
        self.diagonal_F = (self.diagonal_F - block_FP.square().sum(1)).clamp_min(self.ridge / 2)
        self.cross_FO = self.cross_FO - block_FP @ explained_PO
        self.free_F[picks] = False
        self.order += picks.tolist()

    def _columns(self, neurons: Tensor) -> Tensor:
        """Columns [F, M] of the covariance that is left, with the ridge."""
        columns_FM = self.c_FF[:, neurons].clone()
        columns_FM[neurons, torch.arange(len(neurons), device=neurons.device)] += self.ridge
        known = self.factor_FP[:, : self.picked]
        return columns_FM - known @ known[neurons].T


def _greedy_few(c_MM: Tensor, cross_MO: Tensor, wanted: int) -> Tensor:
    """Forward selection among M candidates, one by one."""
    c_MM, cross_MO = c_MM.clone(), cross_MO.clone()
    left = torch.ones(len(c_MM), dtype=torch.bool, device=c_MM.device)
    floor = 1e-9 * mean_diagonal(c_MM)
    chosen: list[int] = []
    for _ in range(wanted):
        gain_M = cross_MO.square().sum(1) / c_MM.diagonal().clamp_min(floor)
        best = int(torch.where(left, gain_M, -1.0).argmax())
        chosen.append(best)
        left[best] = False
        column_M = c_MM[:, best] / c_MM[best, best].clamp_min(floor)
        cross_MO = cross_MO - torch.outer(column_M, cross_MO[best])
        c_MM = c_MM - torch.outer(column_M, c_MM[best].clone())
    return torch.tensor(chosen, dtype=torch.long, device=c_MM.device)
