"""The page's first facts: the headline, and the metric and the cost at every budget."""

from __future__ import annotations

from typing import Any

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import BudgetResult, Evaluation, MetricResult, Result
from acm_compiler.reporting.contents import Cell, Table, headline_budget, is_close


def headline(found: Evaluation) -> dict[str, Any] | None:
    """The best budget in a sentence and as (term, value, note); None where no budget was measured."""
    best = headline_budget(found)
    return None if best is None else {"text": _headline(found, best), "facts": _facts(found, best)}


def _headline(found: Evaluation, best: BudgetResult) -> str:
    name, dense = found.metric.name, found.metric.dense
    asked, cost = found.names[best.asked], wording.percent(best.model_share)
    start = f"At budget {asked} the model spends {cost} of the dense model's MACs"
    reached = f"and reaches {wording.score(best.metric, found.metric)} {name}"
    if dense is None:
        return f"{start} {reached}. The dense model was not at hand to compare with."
    room = "3 points" if found.metric.is_share else "3 %"
    if is_close(best, found):
        why = f"It is the cheapest budget measured that stays within {room} of it."
    else:
        why = f"No budget measured stays within {room} of it; this one comes closest."
    return f"{start} {reached}; the dense model reaches {wording.score(dense, found.metric)}. {why}"


def _facts(found: Evaluation, best: BudgetResult) -> list[tuple[str, str, str]]:
    name = found.metric.name
    spread = f"{wording.macs_of(best.macs_mean, found.dense_macs)} per example"
    facts = [
        ("Budget asked", found.names[best.asked], f"reached {best.reached:.3f} of the learners' MACs"),
        ("Cost, modelled", wording.percent(best.model_share), spread),
        (f"{name.capitalize()}, measured", wording.score(best.metric, found.metric), wording.count(found.n, "example")),
    ]
    if best.difference is not None:
        low, high = (wording.signed(value, found.metric) for value in (best.difference.low, best.difference.high))
        term = f"To dense, {wording.unit_of_difference(found.metric)}"
        facts.append((term, wording.signed(best.difference.mean, found.metric), f"95 % interval {low} to {high}"))
    return facts


def cost_caption(found: Evaluation) -> str:
    """How to read the chart of the metric over cost."""
    bars = (
        "Bars: 95 % interval of the difference to the dense model, on the same examples."
        if found.metric.dense is not None
        else f"Bars: 95 % interval of the {found.metric.name}."
    )
    dashed = " The dashed line overrules the gates and gives every token the same k."
    fixed = f"{dashed} To fixed k: {wording.CONTROL}." if found.fixed else ""
    return f"{bars}{fixed} MACs are modelled from the learners that ran; {found.metric.name} is measured."


def cost_alt(found: Evaluation) -> str:
    """That chart in words."""
    name = found.metric.name
    points = "; ".join(
        f"budget {asked}: {wording.percent(b.model_share)} of the dense MACs, {wording.score(b.metric, found.metric)}"
        for asked, b in zip(found.names.values(), found.budgets, strict=True)
    )
    dense = wording.score(found.metric.dense, found.metric)
    return f"{name} over the share of the dense model's MACs. {points}. Dense: {dense}."


def budget_table(found: Evaluation) -> Table:
    """A row for every budget, every fixed k and the dense model."""
    name = found.metric.name
    to_dense = f"to dense, {wording.unit_of_difference(found.metric)}"
    alike = [] if found.metric.likeness is None else [found.metric.likeness]
    control = ["to fixed k"] if found.fixed else []
    cost = ["share of dense MACs", "MACs per example [p5, p95]"]
    headers = ["budget", "reached", name, to_dense, *control, *alike, *cost]
    gates: list[list[Cell]] = [
        [
            found.names[b.asked],
            *_cells(b, found.metric, [wording.difference(b.over_fixed, found.metric)] * len(control)),
        ]
        for b in found.budgets
    ]
    fixed: list[list[Cell]] = [[f"every k = {f.k}", *_cells(f, found.metric, [""])] for f in found.fixed]
    between = [""] * (1 + len(control) + len(alike))
    dense: list[Cell] = ["dense", "", wording.score(found.metric.dense, found.metric), *between, wording.percent(1.0)]
    groups = [gates, fixed, [[*dense, wording.macs(found.dense_macs)]]]
    return Table(f"{name} and cost", headers, groups, wide=True)


def _cells(result: Result, metric: MetricResult, control: list[str]) -> list[str]:
    return [
        f"{result.reached:.3f}",
        wording.score(result.metric, metric),
        wording.difference(result.difference, metric),
        *control,
        *([] if metric.likeness is None else [wording.likeness(result.likeness)]),
        wording.percent(result.model_share),
        _in_two(wording.macs_spread(result.macs_mean, result.macs_p5, result.macs_p95)),
    ]


def _in_two(spread: str) -> str:
    """A mean and its spread, broken between the two where there is no room, and nowhere else."""
    return spread.replace(" ", "\u00a0").replace("\u00a0[", " [")
