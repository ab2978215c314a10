"""Activation sparsity without training: linear layers that skip the inputs that matter least, token by token.

A layer y = W x reads the columns of W whose scores reach a threshold. TEAL (arXiv 2408.14690) scores an input by |x_i|,
WINA (arXiv 2505.19427) by |x_i| times the norm of column i. A threshold is a quantile of the layer's scores on
calibration tokens, and the same share of the inputs is kept in every layer: the papers also allot shares by layer, and
WINA rotates the model first, which is not done here. Unstructured masks save time for one token at a time at best.

Shapes: T tokens, D inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from acm_compiler.planning.plan import Plan
from benchmarks.method import BATCHES, ChangedInputs

# tokens that a layer's thresholds are taken from
_SAMPLE = 512


def plain(weight_OD: Tensor) -> Tensor:
    """Weights of TEAL: every input counts alike."""
    return weight_OD.new_ones(weight_OD.shape[1])


def column_norms(weight_OD: Tensor) -> Tensor:
    """Weights of WINA."""
    return weight_OD.norm(dim=0)


@dataclass(slots=True)
class _Layer:
    """One linear layer: what its inputs' magnitudes are weighted by, [D], and scores [T, D] seen while fitting."""

    linear: nn.Linear
    weight_D: Tensor
    seen: list[Tensor] = field(default_factory=list)
    thresholds: dict[float, float] = field(default_factory=dict)

    def scores(self, x: Tensor) -> Tensor:
        return x.abs() * self.weight_D


class SparseActivations(ChangedInputs):
    """The linear layers of a plan's sites in the dense model, with `weights` plain (TEAL) or column_norms (WINA)."""

    def __init__(self, dense: nn.Module, plan: Plan, weights: Callable[[Tensor], Tensor]) -> None:
        super().__init__(dense, plan)
        self.layers = [_Layer(linear, weights(linear.weight.detach())) for linear in self.linears]

    def look(self, place: int, x_TD: Tensor) -> None:
        scores_TD = self.layers[place].scores(x_TD)
        self.layers[place].seen.append(scores_TD[:: max(1, len(scores_TD) * BATCHES // _SAMPLE)])

    def settle(self, shares: Sequence[float]) -> None:
        for layer in self.layers:
            ordered = torch.cat(layer.seen).flatten().sort().values
            layer.seen.clear()
            last = len(ordered) - 1
            layer.thresholds = {share: float(ordered[round((1 - share) * last)]) for share in shares}

    def change(self, place: int, x: Tensor, share: float) -> Tensor:
        layer = self.layers[place]
        keep = layer.scores(x) >= layer.thresholds[share]
        real, out = self.mask_of(x), layer.linear.out_features
        self.kept_macs += int(keep[real].sum()) * out
        self.all_macs += int(real.sum()) * x.shape[-1] * out
        return x * keep
