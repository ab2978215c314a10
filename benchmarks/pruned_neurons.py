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
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from acm_compiler.errors import UsageError
from acm_compiler.planning.plan import Plan
from benchmarks.method import ChangedInputs


@dataclass(slots=True)
class _Mlp:
    """The second layer of an MLP, MACs of one of its neurons, and activations [T, F] seen while fitting."""

    second: nn.Linear
    neuron_macs: int
    seen: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(dense: nn.Module, plan: Plan) -> list[_Mlp]:
        """The MLPs among a plan's sites; UsageError for other sites."""
        found = []
        for site in plan.sites:
            if site.dense_width is None:
                raise UsageError("only MLPs have hidden neurons", where=site.name)
            layers = [part for part in dense.get_submodule(site.name).modules() if isinstance(part, nn.Linear)]
            second = next(layer for layer in layers if layer.in_features == site.dense_width)
            found.append(_Mlp(second, sum(layer.weight.numel() for layer in layers) // site.dense_width))
        return found


class _OnNeurons(ChangedInputs):
    """Looks at the hidden activations of MLPs."""

    def __init__(self, dense: nn.Module, plan: Plan) -> None:
        super().__init__(dense, plan)
        self.mlps = _Mlp.of(dense, plan)

    @property
    def changed(self) -> Sequence[nn.Linear]:
        return [mlp.second for mlp in self.mlps]

    def look(self, place: int, x_TD: Tensor) -> None:
        self.mlps[place].seen.append(x_TD)

    def count(self, mlp: _Mlp, neurons: int, tokens: int) -> None:
        """Add the MACs of so many neurons, over `tokens` real tokens together."""
        self.kept_macs += neurons * mlp.neuron_macs
        self.all_macs += tokens * mlp.second.in_features * mlp.neuron_macs


class Flap(_OnNeurons):
    """Neurons dropped for every token."""

    def settle(self, shares: Sequence[float]) -> None:
        self.means: list[Tensor] = []
        self.kept: dict[float, list[Tensor]] = {share: [] for share in shares}
        for mlp in self.mlps:
            h_TF = torch.cat(mlp.seen)
            mlp.seen.clear()
            self.means.append(h_TF.mean(0))
            score_F = h_TF.var(0) * mlp.second.weight.detach().square().sum(0)
            ordered = score_F.sort(descending=True).values
            for share in shares:
                self.kept[share].append(score_F >= ordered[round(share * len(ordered)) - 1])

    def change(self, place: int, x: Tensor, share: float) -> Tensor:
        keep_F, tokens = self.kept[share][place], int(self.mask_of(x).sum())
        self.count(self.mlps[place], tokens * int(keep_F.sum()), tokens)
        return torch.where(keep_F, x, self.means[place])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """Routed expert of each neuron, [F], -1 for shared ones; the middle neuron of each, [P]; how many of them run."""

    expert_F: Tensor
    middle_P: Tensor
    run: int


class Cmoe(_OnNeurons):
    """Sixteen experts, as many shared as a token chooses, or one fewer."""

    EXPERTS, MOST_ACTIVE, ROUNDS, TOKENS = 16, 10, 3, 2048

    def settle(self, shares: Sequence[float]) -> None:
        self.experts: dict[float, list[_Experts]] = {share: [] for share in shares}
        for mlp in self.mlps:
            h_TF = torch.cat(mlp.seen)[: self.TOKENS].abs()
            mlp.seen.clear()
            is_active_TF = torch.zeros_like(h_TF).scatter_(1, h_TF.topk(self.MOST_ACTIVE, 1).indices, 1.0)
            for share in shares:
                self.experts[share].append(self._cut(is_active_TF, share))

    def _cut(self, is_active_TF: Tensor, share: float) -> _Experts:
        run = max(1, round(share * self.EXPERTS))
        shared, neurons = run // 2, is_active_TF.shape[1]
        size, routed = neurons // self.EXPERTS, self.EXPERTS - shared
        order_F = is_active_TF.sum(0).argsort(descending=True, stable=True)
        rest = order_F[shared * size :]
        columns = is_active_TF[:, rest].T
        group, middle = balanced_groups(columns, routed, rounds=self.ROUNDS)
        expert_F = torch.full((neurons,), -1)
        expert_F[rest] = group
        return _Experts(expert_F=expert_F, middle_P=rest[middle], run=run - shared)

    def change(self, place: int, x: Tensor, share: float) -> Tensor:
        experts, mlp, real = self.experts[share][place], self.mlps[place], self.mask_of(x)
        chosen = x[..., experts.middle_P].abs().topk(experts.run, -1).indices
        runs_P = torch.zeros(*x.shape[:-1], len(experts.middle_P), dtype=torch.bool).scatter_(-1, chosen, True)
        keep = runs_P[..., experts.expert_F.clamp_min(0)] | (experts.expert_F < 0)
        self.count(mlp, int(keep[real].sum()), int(real.sum()))
        # the middle neurons of experts that do not run are computed all the same, but for their column
        passed_over = int((~runs_P[real]).sum())
        self.kept_macs += passed_over * (mlp.neuron_macs - mlp.second.out_features)
        return x * keep


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
