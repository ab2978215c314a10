"""Hidden neurons of MLPs that run or do not, whole: FLAP, the same for every token, and CMoE, by experts.

FLAP (arXiv 2312.11983) drops the neurons whose activation varies least, weighted by their column of the second layer;
what a dropped neuron gives at the mean goes into the bias. Every layer keeps the same share: one threshold over layers
with standardised scores, as in the paper, lost more on SmolLM2 below .75. CMoE (arXiv 2502.04416) cuts the neurons into
experts of equal size: those among the most active of most tokens are shared, the others are grouped by the tokens at
which they are active, and a token runs the experts whose middle neuron is the most active.

Shapes: T tokens, F hidden neurons, E experts, P routed experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.baselines.site_method import Region, SiteMethod
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.planning.cost import dense_macs_per_token
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan

EXPERTS, MOST_ACTIVE, ROUNDS, TOKENS = 16, 10, 3, 2048


class NeuronRegion(Region):
    """An MLP whose hidden neurons are looked at."""

    def __init__(self, dense: DenseWeights, site: PlannedSite) -> None:
        super().__init__(dense, site)
        assert dense.last is not None and site.dense_width is not None
        self.last, self.neurons = dense.last, site.dense_width
        self.neuron_macs = dense_macs_per_token(site) // site.dense_width


class FlapRegion(NeuronRegion):
    """Neurons dropped for every token; the mean of a dropped one goes into the bias."""

    def __init__(self, dense: DenseWeights, site: PlannedSite) -> None:
        super().__init__(dense, site)
        self.count, self.sums_2F = 0, torch.zeros(2, self.neurons, dtype=torch.float64)
        self.kept: dict[float, Tensor] = {}

    def observe(self, x_TD: Tensor) -> None:
        """Add to the moments of the hidden activations."""
        h_TF = self.dense.hidden(x_TD).double().cpu()
        self.count += len(h_TF)
        self.sums_2F += torch.stack([h_TF.sum(0), h_TF.square().sum(0)])

    def fit(self, shares: Sequence[float]) -> None:
        """Rank the neurons, and keep the first ones of each share."""
        mean_F, square_F = self.sums_2F / self.count
        weight_OF = self.last[0]
        self.mean_F = mean_F.to(weight_OF)
        score_F = (square_F - mean_F.square()).to(weight_OF) * weight_OF.square().sum(0)
        order_F = score_F.argsort(descending=True, stable=True)
        for share in shares:
            kept_F = torch.zeros_like(score_F, dtype=torch.bool)
            kept_F[order_F[: max(1, int(share * self.neurons + 1e-6))]] = True
            self.kept[share] = kept_F

    def compute(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The kept neurons, and the mean of the others."""
        kept_F = self.kept[self.share]
        h_TF = torch.where(kept_F, self.dense.hidden(x_TD), self.mean_F)
        return F.linear(h_TF, *self.last), torch.full((len(x_TD),), int(kept_F.sum()) * self.neuron_macs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed expert of each neuron, [F], -1 for shared ones; the middle neuron of each, [P]; how many of them run."""

    expert_F: Tensor
    middle_P: Tensor
    run: int


class CmoeRegion(NeuronRegion):
    """Sixteen experts, as many shared as a token chooses, or one fewer."""

    def __init__(self, dense: DenseWeights, site: PlannedSite) -> None:
        super().__init__(dense, site)
        self.seen: list[Tensor] = []
        self.experts: dict[float, Experts] = {}

    def observe(self, x_TD: Tensor) -> None:
        """Keep hidden activations of the first tokens."""
        if sum(map(len, self.seen)) < TOKENS:
            self.seen.append(self.dense.hidden(x_TD).abs())

    def fit(self, shares: Sequence[float]) -> None:
        """Cut the neurons into experts, anew for each share."""
        h_TF = torch.cat(self.seen)[:TOKENS]
        self.seen.clear()
        is_active_TF = largest(h_TF, min(MOST_ACTIVE, self.neurons)).float().cpu()
        self.experts = {share: self._cut(is_active_TF, share) for share in shares}

    def _cut(self, is_active_TF: Tensor, share: float) -> Experts:
        run = min(EXPERTS, max(1, int(share * EXPERTS + 1e-6)))
        shared, neurons = run // 2, is_active_TF.shape[1]
        size, routed = neurons // EXPERTS, EXPERTS - shared
        order_F = is_active_TF.sum(0).argsort(descending=True, stable=True)
        rest = order_F[shared * size :]
        group, middle = balanced_groups(is_active_TF[:, rest].T, routed, rounds=ROUNDS)
        expert_F = torch.full((neurons,), -1)
        expert_F[rest] = group
        device = self.last[0].device
        return Experts(expert_F=expert_F.to(device), middle_P=rest[middle].to(device), run=run - shared)

    def compute(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The shared experts, and those whose middle neuron is most active."""
        experts, h_TF = self.experts[self.share], self.dense.hidden(x_TD)
        runs_TP = largest(h_TF[:, experts.middle_P].abs(), experts.run)
        keep_TF = runs_TP[:, experts.expert_F.clamp_min(0)] | (experts.expert_F < 0)
        # the middle neurons of experts that do not run are computed all the same, but for their column
        passed_over_T = (~runs_TP).sum(1) * (self.neuron_macs - len(self.last[0]))
        return F.linear(h_TF * keep_TF, *self.last), keep_TF.sum(1) * self.neuron_macs + passed_over_T


class _OnMlps(SiteMethod):
    """Acts on MLPs; projections of attention stay dense."""

    @classmethod
    def acts(cls, site: PlannedSite) -> bool:
        """True for MLPs."""
        return site.dense_width is not None


class Flap(_OnMlps):
    """Neurons dropped for every token."""

    title, region, masks = "FLAP: neurons dropped for all tokens", FlapRegion, True


class Cmoe(_OnMlps):
    """Experts cut from gated MLPs."""

    title, region, least, masks = "CMoE: experts cut without training", CmoeRegion, 1 / EXPERTS, True

    @classmethod
    def acts(cls, site: PlannedSite) -> bool:
        """True for gated MLPs of enough neurons."""
        return site.kind == "gated_mlp" and (site.dense_width or 0) >= EXPERTS

    @classmethod
    def refuses(cls, model: nn.Module, plan: Plan) -> str | None:
        """A reason without gated MLPs."""
        return None if any(map(cls.acts, plan.sites)) else "its experts are cut from gated MLPs, and there are none"


def largest(value_TE: Tensor, count: int) -> Tensor:
    """True at so many of the largest values of each row."""
    return torch.zeros_like(value_TE, dtype=torch.bool).scatter_(1, value_TE.topk(count, -1).indices, True)


def balanced_groups(points: Tensor, groups: int, *, rounds: int) -> tuple[Tensor, Tensor]:
    """K-means of rows with groups of equal size (one larger where they do not divide): group of each, middle of each.

    Starts from the first rows. Each round assigns rows to places in groups at the least sum of squared distances.
    """
    from scipy.optimize import linear_sum_assignment

    places = torch.arange(len(points)) * groups // len(points)
    centres = points[:groups]
    for _ in range(rounds):
        distance = torch.cdist(points, centres).square()
        rows, columns = linear_sum_assignment(distance[:, places].numpy())
        group = torch.empty(len(points), dtype=torch.long)
        group[torch.from_numpy(rows)] = places[torch.from_numpy(columns)]
        centres = torch.stack([points[group == number].mean(0) for number in range(groups)])
    distance = torch.cdist(points, centres)
    middle = torch.stack([distance[:, n].masked_fill(group != n, torch.inf).argmin() for n in range(groups)])
    return group, middle
