"""`acm.status`: one table of what each site of a rewritten model is and does now."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tabulate import tabulate
from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.acm.intact import refuse_empty
from acm_compiler.errors import counted
from acm_compiler.passes.rewrite.conversion import rewritten
from acm_compiler.runtime.control import Gated, is_held, run_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStatus:
    """One site now: `mode` is a `FixedK`, `Gated` or `Relaxed` as text, a `Gated` without its knob, which says nothing
    to people; `dense` whether the dense region is kept.
    """

    site: str
    kind: str
    learners: str
    state: str
    mode: str
    dense: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a rewritten model; `str()` is a table.

    `budget_range`: the budgets in reach, None where none were measured; `model_range`: what the whole model runs at
    them, as shares of the dense model's MACs. `cap`: what bounds every token's k beside the budget, as a share of N.
    `held`: at how many sites a fixed k overrules the gates. `quantized`: int8 or int4 after `acm.quantize`; `rest`: how
    many linears outside of ACMs are, too, `floats`: at how many sites learners cannot be. `sparsity`: the share of what
    is chosen that is skipped, in which calls.
    """

    sites: tuple[SiteStatus, ...]
    budget: float | dict[str, float] | None
    budget_range: tuple[float, float] | None
    model_range: tuple[float, float] | None = None
    cap: float | None = None
    held: int = 0
    quantized: str | None = None
    rest: int = 0
    floats: int = 0
    sparsity: tuple[float, str] | None = None

    def __str__(self) -> str:
        table = tabulate([asdict(row) for row in self.sites], headers="keys")
        if self.quantized is not None:
            table += f"\n{self.weights}"
        if self.budget_range is None:
            return f"{table}\nbudgets: none measured yet"
        of_model = ""
        if self.model_range is not None:
            low, high = self.model_range
            of_model = f"; in reach: {low:.0%} to {high:.0%} of the dense model's MACs"
        in_range = f"(range {self.budget_range[0]:.3f} to {self.budget_range[1]:.3f})"
        return f"{table}\nbudget: {self._asked} {in_range}{of_model}{self._overruled}"

    @property
    def weights(self) -> str:
        """The type of the learners' weights, and of others that share it, in one line."""
        others = f", and {counted(self.rest, 'linear')} outside of ACMs" if self.rest else ""
        but = f", but floats at {self.floats} of {counted(len(self.sites), 'site')}" if self.floats else ""
        return f"learners: {self.quantized or 'floats'}{but}{others}"

    @property
    def choice(self) -> str:
        """The budget, its cap and how many sites do not follow it, in one line."""
        return f"budget: {self._asked}{self._overruled}"

    @property
    def _asked(self) -> str:
        capped = "" if self.cap is None or self.budget is None else f", every k at most {self.cap:g} N"
        return ("none set" if self.budget is None else _budget_text(self.budget)) + capped

    @property
    def _overruled(self) -> str:
        held = f"; {self.held} of {len(self.sites)} sites run a fixed k" if self.held else ""
        return held if self.sparsity is None else f"{held}; {self._skipped}"

    @property
    def _skipped(self) -> str:
        assert self.sparsity is not None
        share, calls = self.sparsity
        return f"of what is chosen {share:.0%} are skipped" + (" in decode calls" if calls == "decode" else "")


def _budget_text(budget: float | dict[str, float]) -> str:
    if isinstance(budget, dict):
        return ", ".join(f"{phase} {share:.3f}" for phase, share in budget.items())
    return f"{budget:.3f}"


def _mode_text(acm: ACM) -> str:
    if acm.state == "dense":
        return "dense region"
    mode = run_mode(acm)
    return f"Gated(k_lo={mode.k_lo}, k_hi={mode.k_hi})" if isinstance(mode, Gated) else str(mode)


def status(model: nn.Module) -> Status:
    """Table of each site and its current choices; NotRewritten when there are none."""
    found = rewritten(model)
    refuse_empty(found.acms)
    owner = found.owner
    rows = []
    for name, acm in found.acms.items():
        planned = owner.plan.site(name)
        rows.append(
            SiteStatus(
                site=name,
                kind=planned.kind,
                learners=f"{planned.learners} x {planned.width}",
                state=acm.state,
                mode=_mode_text(acm),
                dense=acm.dense is not None,
            )
        )
    measured = (owner.table_min, 1.0) if owner.table else None
    of_model = measured and (owner.plan.cost.model_share(measured[0]), owner.plan.cost.model_share(measured[1]))
    return Status(
        sites=tuple(rows),
        budget=owner.budget,
        budget_range=measured,
        model_range=of_model,
        cap=owner.cap,
        quantized=owner.quantized,
        rest=len(owner.rest),
        floats=sum(owner.quantized is not None and acm.learners.quantized is None for acm in found.acms.values()),
        sparsity=owner.sparsity,
        held=sum(is_held(acm, owner) for acm in found.acms.values()),
    )
