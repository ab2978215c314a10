"""Bootstrap intervals, and the gain of gates over a fixed k at the same share of learner MACs.

Examples made from one source (canvases that show the same digit) are not independent, so whole sources are drawn.
Between the shares of two k the fixed-k control runs one on a part of the examples and the other on the rest, so that
both sides spend alike. Shapes: E examples, M quantities, G groups, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from acm_compiler.evaluation.results import Interval
from acm_compiler.tasks.base import Task

DRAWS = 2000
_SEED = 1
_CELLS = 4_000_000  # of the table draws x groups that is held at a time


def resampled_means(
    values_EM: Tensor, groups_E: Tensor, *, units_E: Tensor | None = None, draws: int = DRAWS
) -> Tensor:
    """Means [R, M] over examples of `values_EM`, each for one draw of the groups with replacement; float64.

    groups_E: an integer per example that names its source. units_E: what an example counts for where the sums of the
    values are to be divided by more than the number of examples. The same draws are made every time.
    """
    names, group_E = torch.unique(groups_E, return_inverse=True)
    count = len(names)
    units_E = values_EM.new_ones(len(values_EM)) if units_E is None else units_E
    columns = torch.cat([values_EM.double(), units_E.double()[:, None]], dim=1)
    sums_GM = torch.zeros(count, columns.shape[1], dtype=torch.float64, device="cpu").index_add_(0, group_E, columns)
    generator = torch.Generator().manual_seed(_SEED)
    parts = []
    for start in range(0, draws, max(1, _CELLS // count)):
        rows = min(max(1, _CELLS // count), draws - start)
        drawn = torch.randint(count, (rows, count), generator=generator, device="cpu")
        times_RG = torch.zeros(rows, count, dtype=torch.float64, device="cpu")
        times_RG.scatter_add_(1, drawn, torch.ones_like(times_RG))
        parts.append(times_RG @ sums_GM)
    totals = torch.cat(parts)
    return totals[:, :-1] / totals[:, -1:]


def interval(mean: float, resampled_R: Tensor) -> Interval:
    """The 95 % percentile interval around an estimate; one without bounds where no draw gives a number.

    Draws that are no number, as the difference of two perplexities that are both infinite, do not count.
    """
    known_R = resampled_R[~resampled_R.isnan()]
    if not len(known_R):
        return Interval(mean=mean, low=-math.inf, high=math.inf)
    # there is nothing between two infinities to interpolate
    how = "linear" if known_R.isfinite().all() else "nearest"
    low, high = torch.quantile(known_R, known_R.new_tensor([0.025, 0.975]), interpolation=how)
    return Interval(mean=mean, low=float(low), high=float(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The examples that a metric was measured on: what each counts for, and which source it is from, both [E]."""

    task: Task
    units_E: Tensor
    groups_E: Tensor

    def value(self, score_E: Tensor) -> float:
        """The metric of these scores."""
        return self.task.value(score_E, self.units_E)

    def error(self, score_E: Tensor) -> float:
        """The metric's standard error; 0 for a single source, infinite where the metric is in one of the draws."""
        drawn_R = self._drawn(score_E[:, None], DRAWS)[:, 0]
        return float(drawn_R.std(correction=0)) if drawn_R.isfinite().all() else math.inf

    def difference(self, a_E: Tensor, b_E: Tensor, *, draws: int = DRAWS) -> Interval:
        """The metric of a minus that of b over the same examples, with its 95 % interval."""
        drawn_R2 = self._drawn(torch.stack([a_E, b_E], dim=1), draws)
        return interval(self.value(a_E) - self.value(b_E), drawn_R2[:, 0] - drawn_R2[:, 1])

    def _drawn(self, score_EM: Tensor, draws: int) -> Tensor:
        means_RM = resampled_means(score_EM, self.groups_E, units_E=self.units_E, draws=draws)
        # a draw of sources without a single unit says nothing
        return self.task.scale(means_RM[means_RM.isfinite().all(1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """One setting: the share of learner MACs that it reached, and the score of every example, [E]."""

    share: float
    score_E: Tensor


def at_share(settings: Sequence[Spent], share: float) -> Tensor | None:
    """Scores of every example, [E], at a share between those of two settings: on the line through both.

    None where no two settings enclose the share: below the smallest, from the largest on, and without any.
    """
    ordered = sorted(settings, key=lambda spent: spent.share)
    for low, high in pairwise(ordered):
        if low.share <= share < high.share:
            part = (share - low.share) / (high.share - low.share)
            return (1 - part) * low.score_E + part * high.score_E
    return None


def against_fixed(gates: Spent, fixed: Sequence[Spent], sample: Sample) -> Interval | None:
    """The gates' metric minus the control's at the same share, paired over examples; None where `at_share` is."""
    control_E = at_share(fixed, gates.share)
    return None if control_E is None else sample.difference(gates.score_E, control_E)
