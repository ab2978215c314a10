"""What gates are worth: one budget against giving every token the same k, at the same share of learner MACs.

Between the shares of two k the control runs the one on a part of the examples and the other on the rest, so that both
sides spend alike. Shapes: E examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from acm_compiler.evaluation.results import Interval
from acm_compiler.evaluation.statistics import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """One setting: the share of learner MACs that it reached, and the score of every example, [E]."""

    share: float
    score_E: Tensor


def against_fixed(gates: Spent, fixed: Sequence[Spent], sample: Sample) -> Interval | None:
    """The gates' metric minus the control's, paired over examples.

    None where no two fixed k enclose the share: below the smallest, from the largest on, and without any.
    """
    ordered = sorted(fixed, key=lambda spent: spent.share)
    for low, high in pairwise(ordered):
        if low.share <= gates.share < high.share:
            part = (gates.share - low.share) / (high.share - low.share)
            return sample.difference(gates.score_E, (1 - part) * low.score_E + part * high.score_E)
    return None
