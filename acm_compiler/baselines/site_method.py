"""Methods that act on a plan's sites: each site's dense computation is replaced by a region that runs a part of it.

The host is a rewritten copy of the dense model, so that sites of every kind of model are found, and what stays dense is
counted as it is for ACMs. Shapes: T tokens, D inputs, O outputs, B examples, S tokens of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.activations import resolve
from acm_compiler.acm.context import observed
from acm_compiler.baselines.method import BatchResult, Method, Subject
from acm_compiler.data import Batch
from acm_compiler.passes.rewrite.conversion import rewritten
from acm_compiler.passes.rewrite.dense_region import DenseLinear, DenseWeights, read_dense
from acm_compiler.passes.rewrite.rewrite import rewrite
from acm_compiler.planning.cost import dense_macs_per_token
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.batch_context import padding_watched
from acm_compiler.runtime.usage import record
from acm_compiler.sources.inputs import call_model


class Region(nn.Module, ABC):
    """Computes a site at `share` of its dense MACs; each forward leaves the MACs of its tokens in `macs_T`."""

    def __init__(self, dense: DenseWeights, site: PlannedSite) -> None:
        super().__init__()
        self.dense, self.site, self.share = dense, site, 1.0
        self.macs_T = torch.empty(0)

    @abstractmethod
    def observe(self, x_TD: Tensor) -> None:
        """Keep what fitting needs of real tokens' inputs."""

    @abstractmethod
    def fit(self, shares: Sequence[float]) -> None:
        """Fit to what was kept, for each of `shares`."""

    @abstractmethod
    def compute(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, O], and the MACs executed for each token [T]."""

    def forward(self, x: Tensor) -> Tensor:
        y_TO, self.macs_T = self.compute(x.reshape(-1, x.shape[-1]))
        return y_TO.reshape(*x.shape[:-1], y_TO.shape[-1])


class Layer(ABC):
    """One linear layer of a site, run at a share of its MACs."""

    def __init__(self, linear: DenseLinear) -> None:
        self.weight_OD, self.bias_O = linear

    @abstractmethod
    def observe(self, x_TD: Tensor) -> None:
        """Keep what fitting needs of real tokens' inputs."""

    @abstractmethod
    def fit(self, shares: Sequence[float]) -> None:
        """Fit to what was kept, for each of `shares`."""

    @abstractmethod
    def run(self, x_TD: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Outputs [T, O], and the MACs executed for each token [T]."""


class LayerRegion(Region):
    """A region of `kind` layers, each observed on the dense model's activations and run at the same share."""

    kind: ClassVar[type[Layer]]

    def __init__(self, dense: DenseWeights, site: PlannedSite) -> None:
        super().__init__(dense, site)
        self.first = [self.kind(linear) for linear in dense.first]
        self.last = None if dense.last is None else self.kind(dense.last)

    def observe(self, x_TD: Tensor) -> None:
        """Show the layers their inputs: the site's, and the hidden activations that these give."""
        for layer in self.first:
            layer.observe(x_TD)
        if self.last is not None:
            self.last.observe(self.dense.hidden(x_TD))

    def fit(self, shares: Sequence[float]) -> None:
        """Fit every layer."""
        for layer in (*self.first, *([] if self.last is None else [self.last])):
            layer.fit(shares)

    def compute(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the layers one after the other."""
        h_TF, macs_T = self.first[0].run(x_TD, self.share)
        if self.last is None:
            return h_TF, macs_T
        h_TF = resolve(self.dense.act)(h_TF)
        for layer in self.first[1:]:
            up_TF, more_T = layer.run(x_TD, self.share)
            h_TF, macs_T = h_TF * up_TF, macs_T + more_T
        y_TO, more_T = self.last.run(h_TF, self.share)
        return y_TO, macs_T + more_T


class SiteMethod(Method):
    """Regions of one kind at the sites that it acts on, all at one share of their MACs; other sites stay dense."""

    region: ClassVar[type[Region]]
    least: ClassVar[float] = 0.0
    """The smallest share of a site's MACs that its region can run."""
    fit_batches: ClassVar[int | None] = None
    """Batches that regions are fitted on; None: all that there are."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.host = rewrite(subject.dense, subject.plan).eval()
        self.found = rewritten(self.host)
        for acm in self.found.acms.values():
            acm.state = "dense"
        weights, plan = read_dense(self.found), subject.plan
        self.regions = {
            name: self.region(weights[name], plan.site(name)) for name in self.found.acms if self.acts(plan.site(name))
        }
        self._macs_B = self._dense_B = torch.empty(0)

    @classmethod
    def acts(cls, site: PlannedSite) -> bool:
        """True if the method changes a site like this one."""
        return True

    @classmethod
    def refuses(cls, model: nn.Module, plan: Plan) -> str | None:
        """A reason where it acts on no site of the plan."""
        return None if any(map(cls.acts, plan.sites)) else "the plan holds no site of the kind that it acts on"

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """All its sites at their least."""
        return 1 - (1 - cls.least) * cls._part(plan)

    @classmethod
    def share_of(cls, budget: float, plan: Plan) -> float:
        """The share that its sites run at a budget."""
        part = cls._part(plan)
        return min(1.0, max(cls.least, 1 - (1 - budget) / part)) if part else 1.0

    @classmethod
    def _part(cls, plan: Plan) -> float:
        """The part of the dense model's MACs that is done in the sites it acts on."""
        macs = [own.dense_macs for site, own in zip(plan.sites, plan.cost.sites, strict=True) if cls.acts(site)]
        return sum(macs) / plan.model.dense_macs

    @torch.no_grad()
    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Look at the inputs of all sites in the dense model, then fit and install the regions."""
        with observed(self.found.owner, self._observe):
            for batch in islice(self.subject.fit(), self.fit_batches) if self.regions else ():
                self.call(batch)
        shares = [self.share_of(budget, self.subject.plan) for budget in budgets]
        for name, region in self.regions.items():
            region.fit(shares)
            self.found.acms[name].dense = region

    def _observe(self, acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
        if acm.name in self.regions:
            x_BSD = acm.by_example(x.reshape(-1, x.shape[-1]), x.shape[:-1])
            self.regions[acm.name].observe(x_BSD.flatten(0, 1) if mask_BS is None else x_BSD[mask_BS])

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward with all regions at the share that the budget leaves them."""
        self._set_share(self.asked_of(self.share_of(budget, self.subject.plan)))
        with record(self.host) as usage:
            output = self._forward(batch)
        return BatchResult(self.score(output, batch), usage.kept_macs + self._macs_B)

    def asked_of(self, share: float) -> float:
        """The share that regions are to be asked for, for them to execute `share`."""
        return share

    def _set_share(self, share: float) -> None:
        for region in self.regions.values():
            region.share = share

    def _forward(self, batch: Batch) -> Any:
        """The output for a batch; leaves in `_macs_B` what its sites executed, in `_dense_B` what dense ones would."""
        self._macs_B = self._dense_B = torch.zeros((), dtype=torch.float64)
        with observed(self.found.owner, self._count):
            return self.call(batch)

    def call(self, batch: Batch) -> Any:
        """The host's output for a batch; its sites know what is padding."""
        inputs, mask_BS = self.subject.task.call_arguments(batch)
        with batch_context(self.host, mask=mask_BS), padding_watched(self.found):
            return call_model(self.host, inputs)

    def _count(self, acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
        """Add what one call of a site executed at real tokens."""
        dense_T = torch.full((x.shape[:-1].numel(),), float(dense_macs_per_token(self.found.plan.site(acm.name))))
        run_T = self.regions[acm.name].macs_T.double().cpu() if acm.name in self.regions else dense_T
        macs_BSn = acm.by_example(torch.stack([run_T, dense_T.double()], 1), x.shape[:-1])
        run_B, dense_B = (macs_BSn if mask_BS is None else macs_BSn * mask_BS.cpu()[..., None]).sum(1).unbind(1)
        self._macs_B, self._dense_B = self._macs_B + run_B, self._dense_B + dense_B


class Dense(SiteMethod):
    """The dense model itself, counted in the same way."""

    title = "dense model"

    @classmethod
    def acts(cls, site: PlannedSite) -> bool:
        """False: nothing changes."""
        return False

    @classmethod
    def refuses(cls, model: nn.Module, plan: Plan) -> str | None:
        """None: every model is its own."""
        return None

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """The whole model."""
        return 1.0
