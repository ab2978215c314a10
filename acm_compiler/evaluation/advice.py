"""Advice on a plan: the gain of converting more sites, and the way to keep k = N exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from acm_compiler.errors import counted
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.passes.survey import Findings
from acm_compiler.planning.pack import pack_sites
from acm_compiler.planning.plan import Plan
from acm_compiler.planning.planner import NOT_SELECTED, choose_rules, plan_sites, select
from acm_compiler.recipe.phases import Phase
from acm_compiler.recipe.schema import GateConfig, SiteRule

_CLASSES = ("mlp", "attn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Effect of also converting the `sites` further sites of class `match`.

    `macs_share`: their part of the dense model's MACs. `model_share`: the smallest share of the dense model's MACs
    that the converted model could run at, `model_share_now` as planned (1 for a plan without sites).
    """

    match: str
    sites: int
    macs_share: float
    model_share: float
    model_share_now: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        number = counted(self.sites, "more site")
        return (
            f"also converting {self.match} ({number}, {self.macs_share:.1%} of the model's MACs) would let the model "
            f"run at {self.model_share:.0%} of its MACs, {self.model_share_now:.0%} as planned"
        )


def advise(found: Findings, plan: Plan, rules: Sequence[SiteRule], gate: GateConfig) -> list[Advice]:
    """One advice for each class of which `plan`, made by `rules`, leaves sites dense and so can do less."""
    now = _least(plan)
    slower = {skip.name for skip in plan.skipped if skip.reason != NOT_SELECTED}
    planned = slower | {name for site in plan.sites for name in (site.name, *site.graft.modules)}
    learners = rules[-1].learners if rules else 4
    advice = []
    for match in _CLASSES:
        left = [name for name in select(found.sites, match) if name not in planned]
        if not left:
            continue
        every = choose_rules(found.sites, [SiteRule(match=tuple(left), learners=learners), *rules])
        sites, chosen = pack_sites(found.sites, found.reads, every)
        chosen = {name: rule for name, rule in chosen.items() if name not in slower}
        more = Plan(model=found.model, sites=plan_sites(sites, chosen, gate))
        added = sum(c.dense_macs for s, c in zip(more.sites, more.cost.sites, strict=True) if s.name in left)
        share = added / found.model.dense_macs
        if _least(more) < now:
            advice.append(
                Advice(match=match, sites=len(left), macs_share=share, model_share=_least(more), model_share_now=now)
            )
    return advice


def advise_lossless(found: Evaluation, plan: Plan, schedule: Sequence[Phase]) -> str | None:
    """Advise how to keep k = N as good as the dense model, where calibration alone has made it significantly worse.

    None where it is not worse, where nothing can be kept, and where other phases have trained the model since.
    """
    lossy = [site for site in plan.sites if not site.keeps_answers]
    if not lossy or not found.fixed or not schedule or not all(phase.closed_form for phase in schedule):
        return None
    full = max(found.fixed, key=lambda result: result.k)
    metric, to_dense = found.metric, full.difference
    if to_dense is None or not (to_dense.low > 0 if metric.lower_is_better else to_dense.high < 0):
        return None
    size = wording.difference(to_dense, metric) + (" points" if metric.is_share else "")
    return (
        f"with all learners (k = {full.k}) the {metric.name} is {size} to the dense model: {len(lossy)} of "
        f"{len(plan.sites)} sites were refitted. `lossless: true` at their entry of the recipe's sites keeps the dense "
        "answers at that k, for more parameters, which acmc plan prints"
    )


def _least(plan: Plan) -> float:
    """The smallest share of the dense model's MACs that the plan's model can run at."""
    return plan.cost.model_share(plan.cost.budget_min) if plan.sites else 1.0
