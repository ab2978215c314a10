"""A thinner dense model for each budget, trained as the others are: the same for every token.

MLPs keep the hidden neurons that FLAP's score ranks first, projections the rank that SVD-LLM's whitened factors leave
them; then all weights are trained.

Shapes: T tokens, D inputs, O outputs, F hidden neurons, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.acm.activations import resolve
from acm_compiler.baselines.acms import in_percent
from acm_compiler.baselines.low_rank import ThinLayer
from acm_compiler.baselines.method import BatchResult, Method
from acm_compiler.baselines.pruned_neurons import FlapRegion
from acm_compiler.baselines.site_method import Region
from acm_compiler.baselines.trained.train import TrainedSites
from acm_compiler.data import Batch
from acm_compiler.passes.rewrite.dense_region import DenseLinear, DenseWeights
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say

_LR = 1.5e-3


class NarrowRegion(Region):
    """An MLP of fewer neurons, or a projection of low rank, whose weights can be trained."""

    def __init__(self, dense: DenseWeights, site: PlannedSite) -> None:
        super().__init__(dense, site)
        self.seen = FlapRegion(dense, site) if dense.last is not None else None
        self.layer = ThinLayer(dense.first[0]) if dense.last is None else None
        self.weights, self.biases = nn.ParameterList(), nn.ParameterDict()

    def observe(self, x_TD: Tensor) -> None:
        """Keep the moments that rank neurons, or whiten a projection."""
        (self.seen or self.layer).observe(x_TD)  # type: ignore[union-attr]

    def fit(self, shares: Sequence[float]) -> None:
        """Cut the dense weights to the one share."""
        (share,) = shares
        for linear in self._narrow(share) if self.seen is not None else self._thin(share):
            self._add(linear)
        self.macs = sum(weight.numel() for weight in self.weights)
        self.seen = self.layer = None

    def _narrow(self, share: float) -> list[DenseLinear]:
        assert self.seen is not None and self.dense.last is not None
        self.seen.fit([share])
        kept_F, (weight_OF, bias_O) = self.seen.kept[share], self.dense.last
        lost_O = weight_OF[:, ~kept_F] @ self.seen.mean_F[~kept_F]
        first = [(w_FD[kept_F], None if b_F is None else b_F[kept_F]) for w_FD, b_F in self.dense.first]
        return [*first, (weight_OF[:, kept_F], lost_O if bias_O is None else bias_O + lost_O)]

    def _thin(self, share: float) -> list[DenseLinear]:
        assert self.layer is not None
        self.layer.fit([share])
        rank, (weight_OD, bias_O) = self.layer.rank_of(share), self.dense.first[0]
        if rank is None:
            return [(weight_OD, bias_O)]
        right_RD, left_OR = self.layer.right_MD[:rank], self.layer.left_OM[:, :rank]
        # factors of equal size: those of the closed form differ by orders of magnitude, and Adam's steps do not
        scale_R = (left_OR.norm(dim=0) / right_RD.norm(dim=1)).sqrt()
        return [(scale_R[:, None] * right_RD, None), (left_OR / scale_R, bias_O)]

    def _add(self, linear: DenseLinear) -> None:
        weight, bias = linear
        if bias is not None:
            self.biases[str(len(self.weights))] = nn.Parameter(bias.detach().clone())
        self.weights.append(nn.Parameter(weight.detach().clone()))

    def _run(self, place: int, x_TD: Tensor) -> Tensor:
        bias = self.biases.get(str(place), None)
        return F.linear(x_TD, self.weights[place], bias)

    def compute(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The layers one after the other; every token costs the same."""
        last = len(self.weights) - 1
        h_TF = self._run(0, x_TD)
        if self.dense.last is not None:
            h_TF = resolve(self.dense.act)(h_TF)
            for place in range(1, last):
                h_TF = h_TF * self._run(place, x_TD)
        y_TO = self._run(last, h_TF) if last else h_TF
        return y_TO, torch.full((len(x_TD),), self.macs)


class ThinSites(TrainedSites):
    """The model of one budget."""

    title, region = "thinner dense model", NarrowRegion


class Thin(Method):
    """A model for each budget, each trained by the same number of steps."""

    title, trains = "thinner dense models, trained, one for each budget", True

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """All sites at their least."""
        return ThinSites.floor(model, plan)

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Cut and train a model for each budget."""
        self.models: dict[float, ThinSites] = {}
        for budget in budgets:
            self.models[budget] = ThinSites(self.subject)
            self.models[budget].convert((budget,), say)
            self.models[budget].learn(f"thin at {in_percent(budget)}", lr=_LR, say=say)

    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward of the model of this budget."""
        return self.models[budget].run(batch, budget)
