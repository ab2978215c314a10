"""The page's table of sites: what each ran at every budget, and what each k is expected to cost."""

from __future__ import annotations

from typing import Any

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import BudgetResult, SiteUse
from acm_compiler.planning.cost import site_cost
from acm_compiler.reporting.contents import Bar, Cell, Report, Table, headline_budget
from acm_compiler.reporting.figures import colours_of_k, key_of_k


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
        "count": wording.count(len(rows), "site"),
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
    """What all names start with, up to a dot or underscore; empty for a single name."""
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
