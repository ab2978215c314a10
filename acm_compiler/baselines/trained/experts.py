"""MLPs cut into experts after training: MoEfication (arXiv 2110.01786) and D2DMoE (arXiv 2310.04361).

Both want hidden activations of which most are zero: MLPs get ReLU for their own activation, and the network is trained
to put up with it; D2DMoE also punishes dense activations, by Hoyer's measure (sum |h|)^2 / sum h^2. Then the rows of
the first layer are put into sixteen experts by balanced k-means, and a small router for each MLP learns from its inputs
what the experts would give. MoEfication's router ranks experts by the sum of their activations, and a token runs the k
first ones. D2DMoE's tells the norm of each expert's output, and a token runs those above a share of its largest, the
same share everywhere.

Shapes: T tokens, D inputs, O outputs, F hidden neurons, E experts, G neurons of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.baselines.method import setting_within
from acm_compiler.baselines.pruned_neurons import EXPERTS, balanced_groups, largest
from acm_compiler.baselines.site_method import Region
from acm_compiler.baselines.trained.train import TrainedSites
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say

_LR = 5e-4
_SPARSITY = 0.1  # weight of D2DMoE's loss
ROUNDS, TOKENS = 4, 16_384
_ROUTER_STEPS, _ROUTER_BATCH, _ROUTER_LR = 600, 512, 1e-2
_HALVINGS = 20


class ExpertRegion(Region):
    """An MLP with ReLU: whole and trainable first, then experts and a router.

    `limit`: how many experts run, or, for D2DMoE, the share of the largest norm.
    """

    def __init__(self, dense: DenseWeights, site: PlannedSite) -> None:
        super().__init__(dense, site)
        assert dense.last is not None and site.dense_width is not None
        self.neurons, self.neuron_macs = site.dense_width, (len(dense.first) + 1) * site.d_in
        self.weights = nn.ParameterList(nn.Parameter(weight.clone()) for weight, _ in dense.first)
        biases = (weight.new_zeros(len(weight)) if bias is None else bias.clone() for weight, bias in dense.first)
        self.biases = nn.ParameterList(nn.Parameter(bias) for bias in biases)
        self.last_OF = nn.Parameter(dense.last[0].clone())
        self.bias_O = None if dense.last[1] is None else nn.Parameter(dense.last[1].clone())
        self.router: nn.Sequential | None = None
        self.members: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.hoyer = torch.zeros(())
        self.limits: Mapping[float, float] = {}

    @property
    def router_macs(self) -> int:
        """Multiply-adds of the router for a token."""
        return EXPERTS * (self.site.d_in + EXPERTS)

    def _hidden(self, x_TD: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Hidden activations of some neurons."""
        parts = [F.linear(x_TD, w[rows], b[rows]) for w, b in zip(self.weights, self.biases, strict=True)]
        h_TG = parts[0].relu()
        for part in parts[1:]:
            h_TG = h_TG * part
        return h_TG

    def observe(self, x_TD: Tensor) -> None:
        """Keep the inputs of the first tokens."""
        if sum(map(len, self.seen)) < TOKENS:
            self.seen.append(x_TD)

    def fit(self, shares: Sequence[float]) -> None:
        """Cut the neurons into experts, and teach the router what they give."""
        x_TD = torch.cat(self.seen)[:TOKENS]
        group_F = balanced_groups(self.weights[0].detach().cpu(), EXPERTS, rounds=ROUNDS)[0].to(x_TD.device)
        self.members = [(group_F == expert).nonzero()[:, 0] for expert in range(EXPERTS)]
        self.router = nn.Sequential(nn.Linear(self.site.d_in, EXPERTS), nn.GELU(), nn.Linear(EXPERTS, EXPERTS))
        self.router.to(x_TD.device)
        with torch.no_grad():
            wanted_TE = torch.stack([self._worth(x_TD, rows) for rows in self.members], dim=1)
        with torch.enable_grad():
            self._teach(x_TD, wanted_TE)
        self.router.requires_grad_(False)
        self.seen = [x_TD]

    def _worth(self, x_TD: Tensor, rows: Tensor) -> Tensor:
        """The worth of one expert to each token [T]: the sum of its activations."""
        return self._hidden(x_TD, rows).abs().sum(1)

    def _teach(self, x_TD: Tensor, wanted_TE: Tensor) -> None:
        """The router's loss: cross entropy with each expert's part of the largest."""
        wanted_TE = wanted_TE / wanted_TE.amax(1, keepdim=True).clamp_min(1e-12)
        self._descend(x_TD, wanted_TE, F.binary_cross_entropy_with_logits)

    def _descend(self, x_TD: Tensor, wanted_TE: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        assert self.router is not None
        optimizer = torch.optim.Adam(self.router.parameters(), lr=_ROUTER_LR)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _ROUTER_STEPS)
        for _ in range(_ROUTER_STEPS):
            rows = torch.randint(len(x_TD), (_ROUTER_BATCH,), device=x_TD.device)
            loss(self.router(x_TD[rows]), wanted_TE[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.step()

    def cost(self, runs_TE: Tensor) -> Tensor:
        """MACs of each token [T], where it runs these experts."""
        sizes_E = torch.tensor([len(rows) for rows in self.members], device=runs_TE.device)
        return self.router_macs + (runs_TE * sizes_E).sum(1) * self.neuron_macs

    def choose(self, x_TD: Tensor, limit: float) -> Tensor:
        """The experts that run, bool [T, E]: the `limit` first ones."""
        assert self.router is not None
        return largest(self.router(x_TD), int(limit))

    def compute(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """All neurons while it is trained; then the experts that the router names, each on the tokens that chose it."""
        if self.router is None:
            h_TF = self._hidden(x_TD)
            self.hoyer = (h_TF.abs().sum(1).square() / h_TF.square().sum(1).clamp_min(1e-12)).mean() / self.neurons
            return F.linear(h_TF, self.last_OF, self.bias_O), torch.full((len(x_TD),), self.neurons * self.neuron_macs)
        runs_TE = self.choose(x_TD, self.limits[self.share])
        y_TO = x_TD.new_zeros(len(x_TD), len(self.last_OF))
        for expert, rows in enumerate(self.members):
            of_T = runs_TE[:, expert].nonzero()[:, 0]
            y_TO.index_add_(0, of_T, F.linear(self._hidden(x_TD[of_T], rows), self.last_OF[:, rows]))
        return y_TO if self.bias_O is None else y_TO + self.bias_O, self.cost(runs_TE)


class NormRegion(ExpertRegion):
    """Experts of D2DMoE."""

    def _worth(self, x_TD: Tensor, rows: Tensor) -> Tensor:
        """The norm of one expert's output [T]."""
        return F.linear(self._hidden(x_TD, rows), self.last_OF[:, rows]).norm(dim=1)

    def _teach(self, x_TD: Tensor, wanted_TE: Tensor) -> None:
        """The router's loss: the squared error of its absolute outputs."""
        self._descend(x_TD, wanted_TE / wanted_TE.mean(), lambda found, wanted: F.mse_loss(found.abs(), wanted))

    def choose(self, x_TD: Tensor, limit: float) -> Tensor:
        """The experts whose norm is above this share of the token's largest."""
        assert self.router is not None
        norm_TE = self.router(x_TD).abs()
        return norm_TE >= limit * norm_TE.amax(1, keepdim=True)


class Moefication(TrainedSites):
    """The same number of experts for every token."""

    title, region = "MoEfication: the first k experts", ExpertRegion
    regions: Mapping[str, ExpertRegion]  # type: ignore[assignment]
    name = "moefication"

    @classmethod
    def acts(cls, site: PlannedSite) -> bool:
        """True for MLPs of enough neurons."""
        return (site.dense_width or 0) >= 2 * EXPERTS

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """A router and one expert."""
        part = cls._part(plan)
        least = [
            site.runs * EXPERTS * (site.d_in + EXPERTS) + own.dense_macs / EXPERTS
            for site, own in zip(plan.sites, plan.cost.sites, strict=True)
            if cls.acts(site)
        ]
        return 1 - part + sum(least) / plan.model.dense_macs

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Train the network with ReLU, then cut its MLPs; then find how many experts each budget leaves."""
        for name, region in self.regions.items():
            self.found.acms[name].dense = region
        self.learn(self.name, lr=_LR, say=say, extra=self._extra)
        super().convert(budgets, say)
        shares = {self.share_of(budget, self.subject.plan) for budget in budgets}
        self._limit({share: share for share in shares})

    def _extra(self) -> Tensor:
        """A part of the loss beside the distance of outputs: none."""
        return torch.zeros(())

    def _limit(self, shares: Mapping[float, float]) -> None:
        """The experts that a share of a site's MACs pays for, its router paid."""
        for region in self.regions.values():
            whole = region.neurons * region.neuron_macs
            paid = {share: int(EXPERTS * (share - region.router_macs / whole) + 1e-6) for share in shares}
            region.limits = {share: float(min(EXPERTS, max(1, count))) for share, count in paid.items()}


class D2dmoe(Moefication):
    """Experts whose norm, as the router tells it, is above a share of the largest."""

    title, region, name = "D2DMoE: experts above a threshold", NormRegion, "d2dmoe"

    def _extra(self) -> Tensor:
        """The penalty on dense activations, weighted."""
        return _SPARSITY * torch.stack([region.hoyer for region in self.regions.values()]).mean()

    @torch.no_grad()
    def _limit(self, shares: Mapping[float, float]) -> None:
        """The share of the largest norm at which the tokens that were seen cost what a budget leaves."""
        whole = sum(region.neurons * region.neuron_macs * region.site.runs for region in self.regions.values())
        limits = {
            share: setting_within(self._spent, share * whole, cheap=1.0, dear=0.0, halvings=_HALVINGS)
            for share in shares
        }
        for region in self.regions.values():
            region.limits = limits

    def _spent(self, limit: float) -> float:
        """MACs of all sites for an example, by the tokens that were seen."""
        spent = 0.0
        for region in self.regions.values():
            x_TD = region.seen[0]
            spent += region.site.runs * float(region.cost(region.choose(x_TD, limit)).double().mean())
        return spent
