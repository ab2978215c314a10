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

from acm_compiler.baselines.site_method import Layer, LayerRegion, SiteMethod
from acm_compiler.passes.rewrite.dense_region import DenseLinear

# inputs of a layer that its thresholds are taken from, in tokens of each look
_SAMPLE = 64


class MagnitudeLayer(Layer):
    """A layer that reads the inputs whose magnitude reaches a threshold."""

    def __init__(self, linear: DenseLinear) -> None:
        super().__init__(linear)
        self.seen: list[Tensor] = []
        self.thresholds: dict[float, float] = {}

    def scores(self, x_TD: Tensor) -> Tensor:
        """Scores of the inputs, [T, D]."""
        return x_TD.abs()

    def observe(self, x_TD: Tensor) -> None:
        """Keep the scores of a part of the tokens."""
        self.seen.append(self.scores(x_TD[:: max(1, len(x_TD) // _SAMPLE)]))

    def fit(self, shares: Sequence[float]) -> None:
        """Find the threshold that keeps each share of what was seen."""
        ordered = torch.cat(self.seen).flatten().sort().values
        self.seen.clear()
        last = len(ordered) - 1
        self.thresholds = {share: float(ordered[round((1 - share) * last)]) for share in shares}

    def run(self, x_TD: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """The product with the inputs that are kept."""
        keep_TD = self.scores(x_TD) >= self.thresholds[share]
        return F.linear(x_TD * keep_TD, self.weight_OD, self.bias_O), keep_TD.sum(1) * len(self.weight_OD)


class ColumnLayer(MagnitudeLayer):
    """The same with every magnitude times the norm of the input's column of the weight."""

    def __init__(self, linear: DenseLinear) -> None:
        super().__init__(linear)
        self.norm_D = self.weight_OD.norm(dim=0)

    def scores(self, x_TD: Tensor) -> Tensor:
        """Scores of the inputs, [T, D]."""
        return x_TD.abs() * self.norm_D


class TealRegion(LayerRegion):
    """The layers of a site, each with a threshold of its own."""

    kind = MagnitudeLayer


class WinaRegion(LayerRegion):
    """The layers of a site, each with a threshold of its own."""

    kind = ColumnLayer


class Teal(SiteMethod):
    """Inputs by their magnitude."""

    title, region, masks = "TEAL: small inputs skipped", TealRegion, True


class Wina(SiteMethod):
    """Inputs by their magnitude and their column's norm."""

    title, region, masks = "WINA: inputs of little weight skipped", WinaRegion, True
