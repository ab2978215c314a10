"""Activation sparsity without training: linear layers that skip the inputs that matter least, token by token.

A layer y = W x reads the columns of W whose scores reach a threshold. TEAL (arXiv 2408.14690) scores an input by |x_i|,
WINA (arXiv 2505.19427) by |x_i| times the norm of column i. A threshold is a quantile of the layer's scores on
calibration tokens, and the same share of the inputs is kept in every layer: the papers also allot shares by layer, and
WINA rotates the model first, which is not done here. Unstructured masks save time for one token at a time at best.

Shapes: T tokens, D inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.activations import resolve
from acm_compiler.baselines.site_method import Region, SiteMethod
from acm_compiler.passes.rewrite.dense_region import DenseLinear, DenseWeights
from acm_compiler.planning.decisions import PlannedSite

# inputs of a layer that its thresholds are taken from, in tokens of each look
_SAMPLE = 64


class SparseLayer:
    """One linear layer: its inputs' magnitudes are weighted by `weight_D`, and those above a threshold are read."""

    def __init__(self, linear: DenseLinear, *, by_columns: bool) -> None:
        self.weight_OD, self.bias_O = linear
        ones_D = self.weight_OD.new_ones(self.weight_OD.shape[1])
        self.weight_D = self.weight_OD.norm(dim=0) if by_columns else ones_D
        self.seen: list[Tensor] = []
        self.thresholds: dict[float, float] = {}

    def scores(self, x_TD: Tensor) -> Tensor:
        """The weight of each input in the output."""
        return x_TD.abs() * self.weight_D

    def look(self, x_TD: Tensor) -> None:
        """Keep the scores of a part of the tokens."""
        self.seen.append(self.scores(x_TD[:: max(1, len(x_TD) // _SAMPLE)]))

    def settle(self, shares: Sequence[float]) -> None:
        """Find the threshold that keeps each share of what was seen."""
        ordered = torch.cat(self.seen).flatten().sort().values
        self.seen.clear()
        last = len(ordered) - 1
        self.thresholds = {share: float(ordered[round((1 - share) * last)]) for share in shares}

    def run(self, x_TD: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Outputs [T, O], and the MACs of each token [T]."""
        keep_TD = self.scores(x_TD) >= self.thresholds[share]
        return F.linear(x_TD * keep_TD, self.weight_OD, self.bias_O), keep_TD.sum(1) * len(self.weight_OD)


class SparseRegion(Region):
    """The layers of a site, each with its own threshold; thresholds are taken from the dense model's activations."""

    by_columns = False

    def __init__(self, dense: DenseWeights, site: PlannedSite) -> None:
        super().__init__(dense, site)
        self.first = [SparseLayer(linear, by_columns=self.by_columns) for linear in dense.first]
        self.last = None if dense.last is None else SparseLayer(dense.last, by_columns=self.by_columns)

    def look(self, x_TD: Tensor) -> None:
        """Keep scores of the inputs, and of the hidden activations that they give."""
        for layer in self.first:
            layer.look(x_TD)
        if self.last is not None:
            self.last.look(self.dense.hidden(x_TD))

    def settle(self, shares: Sequence[float]) -> None:
        """Find every layer's thresholds."""
        for layer in (*self.first, *([] if self.last is None else [self.last])):
            layer.settle(shares)

    def compute(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Every layer on what it keeps of its inputs."""
        h_TF, macs_T = self.first[0].run(x_TD, self.share)
        if self.last is None:
            return h_TF, macs_T
        h_TF = resolve(self.dense.act)(h_TF)
        for layer in self.first[1:]:
            up_TF, more_T = layer.run(x_TD, self.share)
            h_TF, macs_T = h_TF * up_TF, macs_T + more_T
        y_TO, more_T = self.last.run(h_TF, self.share)
        return y_TO, macs_T + more_T


class _ByColumns(SparseRegion):
    by_columns = True


class Teal(SiteMethod):
    """Inputs by their magnitude."""

    title, region, masks = "TEAL: small inputs skipped", SparseRegion, True


class Wina(SiteMethod):
    """Inputs by their magnitude and their column's norm."""

    title, region, masks = "WINA: inputs of little weight skipped", _ByColumns, True
