"""Low rank without training: every linear layer becomes two thin ones, the same for every token.

SVD-LLM (arXiv 2403.07378) cuts the singular values of W S, where S S^T is the second moment of the layer's inputs, so
that what is cut is what the outputs miss on calibration tokens. Its weights are not updated afterwards, and every layer
keeps the same share.

Shapes: T tokens, D inputs and O outputs of a layer, R rank, M the smaller one of O and D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.baselines.site_method import Layer, LayerRegion, SiteMethod
from acm_compiler.passes.rewrite.dense_region import DenseLinear
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan

_RIDGE = 1e-6  # of the mean variance: inputs that calibration tokens do not span


class ThinLayer(Layer):
    """The moment of a layer's inputs, then its factors [O, M] and [M, D], of which a share is run."""

    def __init__(self, linear: DenseLinear) -> None:
        super().__init__(linear)
        size = self.weight_OD.shape[1]
        self.moment_DD = torch.zeros((size, size), dtype=torch.float64)
        self.left_OM = self.right_MD = torch.empty(0)

    def observe(self, x_TD: Tensor) -> None:
        """Add to the second moment."""
        x_TD = x_TD.double().cpu()
        self.moment_DD += x_TD.T @ x_TD

    def fit(self, shares: Sequence[float]) -> None:
        """Factor the weight; a share cuts the factors later."""
        self.left_OM, self.right_MD = whitened(self.weight_OD, self.moment_DD)

    def run(self, x_TD: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Two thin products where they cost less than the weight; the same MACs for every token."""
        rank = self.rank_of(share)
        if rank is None:
            return F.linear(x_TD, self.weight_OD, self.bias_O), torch.full((len(x_TD),), self.weight_OD.numel())
        y_TO = F.linear(F.linear(x_TD, self.right_MD[:rank]), self.left_OM[:, :rank], self.bias_O)
        return y_TO, torch.full((len(x_TD),), rank * sum(self.weight_OD.shape))

    def rank_of(self, share: float) -> int | None:
        """The rank that costs this share of the weight's MACs, None where the weight itself costs no more."""
        sides, macs = sum(self.weight_OD.shape), self.weight_OD.numel()
        rank = max(1, int(share * macs / sides))
        return rank if rank * sides < macs else None


class ThinRegion(LayerRegion):
    """The layers of a site, each cut to the rank that its share allows."""

    kind = ThinLayer


class LowRank(SiteMethod):
    """SVD-LLM's factors of all layers."""

    title, region = "SVD-LLM: layers of low rank", ThinRegion

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """One column of each factor."""
        ones = sum(site.runs * _rank_one(site) for site in plan.sites)
        return (plan.cost.fixed_macs + ones) / plan.model.dense_macs


def _rank_one(site: PlannedSite) -> int:
    """MACs of a token at a site whose layers have rank 1."""
    if site.dense_width is None:
        return site.d_in + site.d_out
    return len(site.first) * (site.d_in + site.dense_width) + site.dense_width + site.d_out


def whitened(weight_OD: Tensor, moment_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of a weight, [O, M] and [M, D], in the order of what they add to the outputs."""
    ridge_DD = _RIDGE * moment_DD.diagonal().mean() * torch.eye(len(moment_DD), dtype=torch.float64)
    root_DD = torch.linalg.cholesky(moment_DD + ridge_DD)
    u_OM, values_M, v_MD = torch.linalg.svd(weight_OD.double().cpu() @ root_DD, full_matrices=False)
    right_MD = torch.linalg.solve_triangular(root_DD, v_MD, upper=False, left=False)
    return (u_OM * values_M).to(weight_OD), right_MD.to(weight_OD)
