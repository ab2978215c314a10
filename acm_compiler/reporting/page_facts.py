"""The page's facts: the headline, metric and cost at every budget, the sites, and how the numbers were made."""

from __future__ import annotations

from typing import Any

from acm_compiler.errors import counted, excluded_text
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import BudgetResult, DenseFrom, Evaluation, Result, SiteUse
from acm_compiler.evaluation.statistics import DRAWS
from acm_compiler.planning.cost import site_cost
from acm_compiler.reporting.contents import Bar, Cell, Report, Table
from acm_compiler.reporting.figures import colours_of_k, key_of_k

_CLOSE = 0.03


def headline_budget(found: Evaluation) -> BudgetResult | None:
    """The cheapest budget close to the dense model, else the best one; None where no budget was measured."""
    close = [b for b in found.budgets if _is_close(b, found)]
    if close:
        return min(close, key=lambda b: b.model_share)
    sign = -1 if found.metric.lower_is_better else 1
    return max(found.budgets, key=lambda b: sign * b.metric, default=None)


def _is_close(budget: BudgetResult, found: Evaluation) -> bool:
    """True if the metric is at most three points worse than the dense model's (3 % of it for what is no share)."""
    dense = found.metric.dense
    if dense is None:
        return False
    worse = budget.metric - dense if found.metric.lower_is_better else dense - budget.metric
    return worse <= _CLOSE * (1 if found.metric.is_share else abs(dense))


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
    if _is_close(best, found):
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
        (f"{name.capitalize()}, measured", wording.score(best.metric, found.metric), counted(found.n, "example")),
    ]
    if best.difference is not None:
        low, high = (wording.signed(value, found.metric) for value in (best.difference.low, best.difference.high))
        term = f"To dense, {wording.unit_of_difference(found.metric)}"
        facts.append((term, wording.signed(best.difference.mean, found.metric), f"95 % interval {low} to {high}"))
    return facts


def cost_caption(found: Evaluation) -> str:
    """Caption of the chart of the metric over cost."""
    bars = (
        "Bars: 95 % interval of the difference to the dense model, on the same examples."
        if found.metric.dense is not None
        else f"Bars: 95 % interval of the {found.metric.name}."
    )
    dashed = " The dashed line overrules the gates and gives every token the same k."
    fixed = f"{dashed} To fixed k: {wording.CONTROL}." if found.fixed else ""
    return f"{bars}{fixed} MACs are modelled from the learners that ran; {found.metric.name} is measured."


def cost_alt(found: Evaluation) -> str:
    """The chart of the metric over cost, as text."""
    name = found.metric.name
    points = "; ".join(
        f"budget {asked}: {wording.percent(b.model_share)} of the dense MACs, {wording.score(b.metric, found.metric)}"
        for asked, b in zip(found.names.values(), found.budgets, strict=True)
    )
    dense = wording.score(found.metric.dense, found.metric)
    return f"{name} over the share of the dense model's MACs. {points}. Dense: {dense}."


def budget_table(found: Evaluation) -> Table:
    """A row for every budget, every fixed k and the dense model."""
    columns = wording.columns(found)
    share, spread = columns.pop(wording.SHARE), columns.pop(wording.SPREAD)
    columns["share of dense MACs"] = share
    columns[wording.SPREAD] = spread._replace(of=lambda result: _in_two(spread.of(result)))

    def row(name: str, result: Result) -> list[Cell]:
        return [name, *(column.of(result) for column in columns.values())]

    gates = [row(found.names[budget.asked], budget) for budget in found.budgets]
    fixed = [row(f"every k = {fixed.k}", fixed) for fixed in found.fixed]
    dense: list[Cell] = ["dense", *(column.of_dense for column in columns.values())]
    return Table(f"{found.metric.name} and cost", ["budget", *columns], [gates, fixed, [dense]], wide=True)


def _in_two(spread: str) -> str:
    """A mean and its spread, broken between the two where there is no room, and nowhere else."""
    return spread.replace(" ", "\u00a0").replace("\u00a0[", " [")


def site_facts(report: Report) -> dict[str, Any]:
    """One row per site, with a stacked bar of k for every budget; the expected damage of every k, where known."""
    budgets, names, sites = report.evaluation.budgets, report.evaluation.names, report.plan.sites
    compared = _compared(report)
    shared = shared_start([site.name for site in sites])
    headers = ["site", *(f"budget {names[b.asked]}" for b in budgets)]
    headers += [f"{_ratio_name(compared)} at {names[compared.asked]}"] if compared else []
    headers += ["kind", "learners", "k", "share of all MACs"]
    rows = [_row(report, index, site.name.removeprefix(shared), compared) for index, site in enumerate(sites)]
    return {
        "count": counted(len(rows), "site"),
        "prefix": shared,
        "legend": key_of_k([site.learners for site in sites]),
        "table": Table("sites", headers, [rows], wide=True),
        "damages": _damages(report.damages, shared) if report.damages else None,
    }


def _damages(damages: dict[str, dict[int, float]], shared: str) -> Table:
    every_k = sorted({k for of_site in damages.values() for k in of_site})
    rows: list[list[Cell]] = [
        [name.removeprefix(shared), *(f"{of_site[k]:.1e}" if k in of_site else "" for k in every_k)]
        for name, of_site in damages.items()
    ]
    return Table("expected damage", ["expected damage", *(f"k = {k}" for k in every_k)], [rows])


def shared_start(names: list[str]) -> str:
    """Longest common start of all names, up to a dot or underscore; empty for a single name."""
    length = 0
    while len(names) > 1 and len({name[: length + 1] for name in names}) == 1 and length < len(names[0]):
        length += 1
    start = names[0][:length]
    return start[: max(start.rfind("."), start.rfind("_")) + 1]


def _row(report: Report, index: int, name: str, compared: BudgetResult | None) -> list[Cell]:
    site = report.plan.sites[index]
    cells: list[Cell] = [name, *(_bar(budget.per_site[index]) for budget in report.evaluation.budgets)]
    if compared is not None:
        ratio = compared.per_site[index].foreground_ratio
        cells.append("-" if ratio is None else f"{ratio:.2f}")
    kind = site.kind.replace("_", " ") + (f" {site.role}" if site.role else "")
    macs = site_cost(site).dense_macs / report.plan.model.dense_macs
    learners = f"{site.learners} × {site.width}"
    return [*cells, kind, learners, f"{site.k_min}–{site.learners}", wording.percent(macs)]


def _compared(report: Report) -> BudgetResult | None:
    """The budget whose object ratio is shown site by site: the headline's, or the dearest that has one."""
    known = [b for b in report.evaluation.budgets if b.foreground is not None and b.reached < 1]
    best = headline_budget(report.evaluation)
    return best if best in known else max(known, key=lambda b: b.asked, default=None)


def _ratio_name(budget: BudgetResult) -> str:
    of = budget.foreground.of if budget.foreground else "patches"
    return {"patches": "object ratio", "frames": "speech ratio"}[of]


def _bar(site: SiteUse) -> Bar:
    total = max(1, sum(site.tokens_by_k))
    shares = [tokens / total for tokens in site.tokens_by_k]
    colours = colours_of_k(len(shares) - 1)
    parts = [(f"{100 * share:.1f}%", colour) for share, colour in zip(shares, colours, strict=True) if share > 0]
    words = ", ".join(f"k = {k}: {share:.0%}" for k, share in enumerate(shares) if share > 0)
    return Bar(parts, words, f"{site.share:.2f}")


_DENSE: dict[DenseFrom | None, str] = {
    "original": "The model before conversion, run on the same examples.",
    "regions": "The dense regions that the sites replaced, run inside today's model: the model before conversion as "
    "long as nothing else was trained.",
    "recorded": "Measured earlier, when the model was converted; not on this run's examples, so no interval is given.",
    None: "Not measured: the dense regions are not kept with the model, and the original was not at hand.",
}


def method_facts(report: Report) -> dict[str, str]:
    """The method: what was measured, what was modelled, on how many examples, with which versions."""
    found = report.evaluation
    return {
        "Measured": _measured(found),
        "Modelled": _modelled(report),
        "Intervals": _intervals(found),
        "Dense model": _DENSE[found.metric.dense_from],
        "Budget": _budget(found),
        "Padding": "Left out of every count." if found.masked else "No padding mask was given: all tokens count.",
        "Versions": wording.versions_text(found.versions),
    }


def _measured(found: Evaluation) -> str:
    what = f"{found.metric.name.capitalize()} of {found.model.rpartition('.')[2]}"
    excluded = f" Excluded examples, which count nowhere: {excluded_text(found.left_out)}." if found.left_out else ""
    examples = counted(found.n, "example")
    return f"{what} on {examples}, every budget on the same ones, and the k that each token ran.{excluded}"


def _modelled(report: Report) -> str:
    not_counted = ", ".join(report.plan.model.not_counted)
    left_out = f" Not counted: {not_counted}." if not_counted else ""
    time = "acmc bench measures time" if report.times is None else "time was measured by acmc bench"
    return (
        "MACs (1 MAC = 1 multiply-add = 2 FLOPs), by arithmetic: the learners that ran, all gates, and what stays "
        "dense, each example by its own length; those of the dense model likewise."
        f"{left_out} MACs are not time; {time}."
    )


def _intervals(found: Evaluation) -> str:
    if found.groups == found.n:
        drawn = "the examples"
    else:
        drawn = f"the {counted(found.groups, 'source')} that the examples come from"
    return (
        f"95 % bootstrap intervals, {DRAWS:,} draws of {drawn}. Differences to the dense model are paired: "
        "both ran on the same examples."
    )


def _budget(found: Evaluation) -> str:
    missed = [b for b in found.budgets if abs(b.reached - b.asked) > 0.01]
    text = (
        "A budget is the share of the learners' MACs, as a mean over examples. The setting of the gates for each "
        "budget was fixed beforehand; the column “reached” says what it came to here."
    )
    if missed:
        listed = ", ".join(f"{found.names[b.asked]} (reached {b.reached:.3f})" for b in missed)
        return f"{text} Off by more than .01: {listed}."
    return f"{text} None is off by more than .01."
