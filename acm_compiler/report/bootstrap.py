"""Uncertainty by resampling: how much a mean would move had other sources been drawn.

Examples made from one source (canvases that show the same digit) are not independent, so whole sources are drawn.
Shapes: E examples, M quantities, G groups, R draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acm_compiler.report.evaluation import Interval

DRAWS = 2000
_SEED = 1
_CELLS = 4_000_000  # of the table draws x groups that is held at a time


def resampled_means(values_EM: Tensor, groups_E: Tensor, *, draws: int = DRAWS) -> Tensor:
    """Means [R, M] over examples of `values_EM`, each for one draw of the groups with replacement; float64.

    groups_E: an integer per example that names its source. The same draws are made every time.
    """
    names, group_E = torch.unique(groups_E, return_inverse=True)
    count = len(names)
    columns = torch.cat([values_EM.double(), torch.ones(len(values_EM), 1, dtype=torch.float64)], dim=1)
    sums_GM = torch.zeros(count, columns.shape[1], dtype=torch.float64).index_add_(0, group_E, columns)
    generator = torch.Generator().manual_seed(_SEED)
    parts = []
    for start in range(0, draws, max(1, _CELLS // count)):
        rows = min(max(1, _CELLS // count), draws - start)
        drawn = torch.randint(count, (rows, count), generator=generator)
        times_RG = torch.zeros(rows, count, dtype=torch.float64)
        times_RG.scatter_add_(1, drawn, torch.ones_like(times_RG))
        parts.append(times_RG @ sums_GM)
    totals = torch.cat(parts)
    return totals[:, :-1] / totals[:, -1:]


def interval(mean: float, resampled_R: Tensor) -> Interval:
    """The 95 % percentile interval around an estimate."""
    low, high = torch.quantile(resampled_R, torch.tensor([0.025, 0.975], dtype=resampled_R.dtype))
    return Interval(mean=mean, low=float(low), high=float(high))


def paired_difference(a_E: Tensor, b_E: Tensor, groups_E: Tensor, *, draws: int = DRAWS) -> Interval:
    """Mean of a - b over the same examples, with its 95 % interval."""
    difference = a_E.double() - b_E.double()
    return interval(float(difference.mean()), resampled_means(difference[:, None], groups_E, draws=draws)[:, 0])


def standard_error(values_E: Tensor, groups_E: Tensor, *, draws: int = DRAWS) -> float:
    """The standard error of the mean; 0 for a single group."""
    return float(resampled_means(values_E.double()[:, None], groups_E, draws=draws)[:, 0].std(correction=0))
