"""`acm.meter`: counters inside a model that is served, eager, compiled or exported."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import TracebackType

import torch
from tabulate import tabulate
from torch import Tensor, nn

from acm_compiler.acm.intact import refuse_empty
from acm_compiler.acm.module import COUNTS
from acm_compiler.errors import NothingRecorded, NotRewritten, UsageError, counted
from acm_compiler.passes.rewrite.conversion import Conversion, refuse_no_module, rewritten
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.budgets import setting_of
from acm_compiler.runtime.control import is_held

TOLERANCE = 0.05


class Meter:
    """Counts of what a model runs, from `acm.meter` on or from the last `reset`, until `stop`.

    All calls count, of all threads together; calls at the same time may lose a count. Padding counts where nothing but
    the call's own arguments tells it: `acm.batch(model, mask=mask)` leaves it out.
    """

    def __init__(self, plan: Plan, counts: Mapping[str, Tensor], owner: Conversion | None, model: nn.Module) -> None:
        self._plan, self._counts, self._owner, self._model = plan, dict(counts), owner, model
        sites = [plan.site(name) for name in self._counts]
        each = [torch.full((s.learners + 1,), macs_per_learner(s), dtype=torch.float64, device="cpu") for s in sites]
        self._run = torch.cat([macs * torch.arange(len(macs), device="cpu") for macs in each])
        self._full = torch.cat([macs * (len(macs) - 1) for macs in each])

    @property
    def k(self) -> dict[str, Tensor]:
        """Tokens that ran k = 0, 1, ..., N at each site, int64 [N + 1] on the CPU."""
        return {name: counts.detach().cpu().clone() for name, counts in self._counts.items()}

    @property
    def tokens(self) -> int:
        """Tokens counted, of all sites together."""
        return sum(int(counts.sum()) for counts in self.k.values())

    @property
    def mean_k(self) -> dict[str, float]:
        """Mean learners per token at each site that has run."""
        sums = {name: (learners_run(counts), int(counts.sum())) for name, counts in self.k.items()}
        return {name: learners / tokens for name, (learners, tokens) in sums.items() if tokens}

    @property
    def macs(self) -> tuple[float, float]:
        """MACs of the learners that ran, and of all N at the same tokens."""
        counts = torch.cat([counts.detach().cpu() for counts in self._counts.values()]).double()
        return float(counts @ self._run), float(counts @ self._full)

    @property
    def share(self) -> float:
        """The share of learner MACs over all tokens together. NothingRecorded where none ran."""
        run, full = self.macs
        if not full:
            raise NothingRecorded("the meter has counted no token yet", fix="call the model first")
        return run / full

    @property
    def promised(self) -> float | None:
        """The share that the budget table expects at the budget set now; None where none is set, or one per phase."""
        owner = self._owner
        if owner is None or not isinstance(owner.budget, float) or owner.cap is not None:
            return None
        if any(is_held(acm, owner) for acm in rewritten(self._model).acms.values()):
            return None
        return setting_of(owner, owner.budget).share

    @property
    def drift(self) -> float | None:
        """`share` minus `promised`; None where nothing is promised."""
        promised = self.promised
        return None if promised is None else self.share - promised

    def check(self, tolerance: float = TOLERANCE) -> bool:
        """False, with a warning, where the share is off what was promised by more than `tolerance`."""
        drift = self.drift
        if drift is None or abs(drift) <= tolerance:
            return True
        again = "acm.recalibrate(model, batches) measures it again on batches of this kind"
        warnings.warn(f"{drift_text(self.share, self.share - drift)}; {again}", stacklevel=2)
        return False

    def reset(self) -> None:
        """Count from here on, as after another budget was set."""
        for counts in self._counts.values():
            with torch.inference_mode(counts.is_inference()):
                counts.zero_()

    def stop(self) -> None:
        """Count no more; what was counted stays. Compiled graphs are made once more."""
        if self._owner is not None:
            for name, acm in rewritten(self._model).acms.items():
                if acm.counts is self._counts.get(name):
                    acm.counts = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __str__(self) -> str:
        """The share, and a row for every site."""
        if not self.tokens:
            return "meter: no token counted yet"
        promised = "" if self.promised is None else f", {self.promised:.3f} promised"
        means = self.mean_k
        most = max(len(counts) for counts in self._counts.values())
        rows = [[name, f"{means[name]:.2f}", *counts.tolist()] for name, counts in self.k.items() if name in means]
        table = tabulate(rows, headers=["site", "mean k", *(f"k = {k}" for k in range(most))], disable_numparse=True)
        return f"share {self.share:.3f} reached{promised}\n{table}"

    def __repr__(self) -> str:
        return f"<Meter of {counted(len(self._counts), 'site')}: {str(self).partition(chr(10))[0]}>"


def meter(model: nn.Module, *, plan: Plan | None = None) -> Meter:
    """Count, in every call of `model` from now on, how many tokens run k = 0, 1, ..., N at each site.

    A model that is compiled makes its graphs once more, with the counters in them; one that is exported afterwards
    takes them along. plan: for a module without ACMs, such as an exported program that was made of a model with a
    meter: reads that module's counters. NotRewritten where there are no counters to read.
    """
    refuse_no_module(model)
    if plan is not None:
        if not isinstance(plan, Plan):
            raise UsageError("plan must be a plan", found=type(plan).__name__, fix="acm.Plan.from_json(text)")
        return Meter(plan, _counters_in(model, plan), None, model)
    found = rewritten(model)
    refuse_empty(found.acms)
    for acm in found.acms.values():
        if acm.counts is None:
            acm.counts = torch.zeros(acm.count + 1, dtype=torch.int64, device=acm.k_lo.device)
    read = Meter(
        found.plan, {name: acm.counts for name, acm in found.acms.items() if acm.counts is not None}, found.owner, model
    )
    read.reset()
    return read


def _counters_in(module: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The counters of a module that was made of a metered model, by site."""
    buffers = dict(module.named_buffers())
    found = {}
    for site in plan.sites:
        path = f"{site.name}.{COUNTS}"
        name = next((name for name in buffers if name == path or name.endswith(f".{path}")), None)
        if name is not None:
            found[site.name] = buffers[name]
    if len(found) < len(plan.sites):
        raise NotRewritten(
            "this module holds no counters",
            found=f"{len(found)} of {counted(len(plan.sites), 'site')}",
            fix="call acm.meter(model) before the model is exported",
        )
    return found


def drift_text(share: float, promised: float) -> str:
    """The warning that a model spends other than its table promised."""
    return (
        f"the share of learner MACs is {share:.3f}, and the budget table promised {promised:.3f}: the data are of "
        "another kind than those it was measured on"
    )


def learners_run(tokens_by_k: Tensor) -> int:
    """k of all tokens added up, of how many ran k = 0, 1, ..., N."""
    return int((tokens_by_k * torch.arange(len(tokens_by_k), device=tokens_by_k.device)).sum())
