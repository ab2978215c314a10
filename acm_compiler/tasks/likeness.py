"""How alike two models answer over a whole data set: what a metric of single examples cannot say.

Shapes: E examples, P pairs of examples, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acm_compiler.data.batch import Batch

# the number of pairs grows with the square of the examples
_COMPARED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """A second measure beside a task's metric: one number from two models' answers to the same examples.

    name: what it is called; 1 where both models answer alike. keep: (output, batch) -> [B, ...], what has to be kept
    of every example. compare: (one model's [E, ...], the other's) -> the number.
    """

    name: str
    keep: Callable[[Any, Batch], Tensor]
    compare: Callable[[Tensor, Tensor], float]


def agreement(found_E: Tensor, wanted_E: Tensor) -> float:
    """The share of examples with the same answer, right or wrong."""
    return float((found_E == wanted_E).double().mean())


def pairwise_spearman(found_ED: Tensor, wanted_ED: Tensor) -> float:
    """Rank correlation of the similarities v . w of all pairs of examples; nan for fewer than three examples.

    Over the first 1,024 examples where there are more.
    """
    count = min(len(found_ED), _COMPARED)
    if count < 3:
        return float("nan")
    rows, columns = torch.triu_indices(count, count, 1)
    ranks_2P = [_ranks((v[:count].double() @ v[:count].double().T)[rows, columns]) for v in (found_ED, wanted_ED)]
    return float(torch.corrcoef(torch.stack(ranks_2P))[0, 1])


def _ranks(value_P: Tensor) -> Tensor:
    """The place of each value in rising order, float64; equal values share the mean of theirs."""
    _, group_P, sizes = torch.unique(value_P, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    return (last - (sizes.double() - 1) / 2)[group_P]
