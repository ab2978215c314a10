"""Activation sparsity without training: linear layers that skip the inputs that matter least, token by token.

A layer y = W x reads the columns of W whose scores reach a threshold. TEAL (arXiv 2408.14690) scores an input by |x_i|,
WINA (arXiv 2505.19427) by |x_i| times the norm of column i. A threshold is a quantile of the layer's scores on
calibration tokens in the dense model, the same one in every layer: the papers also allot shares by layer, and WINA
rotates the model first, which is not done here. Behind layers that skip something inputs are other ones, so a search
finds the quantile with which the whole model executes the share that a budget leaves. Unstructured masks save time for
one token at a time at best.

Shapes: T tokens, D inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.site_method import Layer, LayerRegion, SiteMethod
from acm_compiler.data import Batch
from acm_compiler.passes.rewrite.dense_region import DenseLinear
from acm_compiler.progress import Say
from acm_compiler.runtime.sparsity import quantile, quantiles_of

# batches that are looked at, and tokens of each that a layer's thresholds are taken from; steps of the quantiles kept
_BATCHES, _SAMPLE, _STEPS = 4, 256, 1024
# how near the share executed is to come, and the most steps to get there
_NEAR, _MOST = 0.004, 8


class MagnitudeLayer(Layer):
    """A layer that reads the inputs whose magnitude reaches a threshold."""

    def __init__(self, linear: DenseLinear) -> None:
        super().__init__(linear)
        self.seen: list[Tensor] = []
        self.quantiles: tuple[float, ...] = ()

    def scores(self, x_TD: Tensor) -> Tensor:
        """Scores of the inputs, [T, D]."""
        return x_TD.abs()

    def observe(self, x_TD: Tensor) -> None:
        """Keep the scores."""
        self.seen.append(self.scores(x_TD))

    def fit(self, shares: Sequence[float]) -> None:
        """Keep quantiles of what was seen, for any share."""
        self.quantiles = quantiles_of(torch.cat(self.seen), _STEPS)
        self.seen.clear()

    def threshold(self, share: float) -> float:
        """The score that `share` of what was seen reaches; all do that of 1."""
        return quantile(self.quantiles, 1 - share) if share < 1 else 0.0

    def run(self, x_TD: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """The product with the inputs that are kept."""
        keep_TD = self.scores(x_TD) >= self.threshold(share)
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

    def observe(self, x_TD: Tensor) -> None:
        """Show the layers a part of the tokens."""
        super().observe(x_TD[:: max(1, len(x_TD) // _SAMPLE)])


class WinaRegion(TealRegion):
    """The same with scores of another kind."""

    kind = ColumnLayer


class SparseMethod(SiteMethod):
    """A search for the share of inputs to keep with which the whole model executes what a budget leaves it."""

    fit_batches = _BATCHES

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.asked: dict[float, float] = {}

    def asked_of(self, share: float) -> float:
        """The share to ask for, found by `convert`."""
        return self.asked.get(share, share)

    @torch.no_grad()
    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Fit the regions, then find what to ask them for at each budget."""
        super().convert(budgets, say)
        batches = list(islice(self.subject.fit(), _BATCHES)) if self.regions else []
        known = {0.0: 0.0, 1.0: 1.0}
        for budget in budgets:
            share = self.share_of(budget, self.subject.plan)
            self.asked[share] = self._search(share, batches, known)
            say(f"budget {budget:.3g}: layers keep {self.asked[share]:.3f} of the dense model's inputs")

    def _search(self, share: float, batches: list[Batch], known: dict[float, float]) -> float:
        """The share to ask for, by false position between the nearest of `known` that enclose it.

        known: shares executed by shares asked for; what is tried goes there.
        """
        for _ in range(_MOST):
            nearest = min(known, key=lambda asked: abs(known[asked] - share))
            if abs(known[nearest] - share) <= _NEAR:
                return nearest
            low = max(asked for asked in known if known[asked] < share)
            high = min(asked for asked in known if known[asked] > share)
            place = (share - known[low]) / (known[high] - known[low])
            asked = low + (high - low) * min(max(place, 0.1), 0.9)
            known[asked] = self._executed(asked, batches)
        return asked

    def _executed(self, asked: float, batches: list[Batch]) -> float:
        """The share of the sites' MACs that is executed where layers are asked for this much."""
        self._set_share(asked)
        run = dense = 0.0
        for batch in batches:
            self._forward(batch)
            run, dense = run + float(self._macs_B.sum()), dense + float(self._dense_B.sum())
        return run / dense if dense else asked


class Teal(SparseMethod):
    """Inputs by their magnitude."""

    title, region, masks = "TEAL: small inputs skipped", TealRegion, True


class Wina(SparseMethod):
    """Inputs by their magnitude and their column's norm."""

    title, region, masks = "WINA: inputs of little weight skipped", WinaRegion, True
