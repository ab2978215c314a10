"""The report as one HTML page: everything inside it, no scripts, no requests."""

from __future__ import annotations

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import BudgetResult, Evaluation, MetricResult, Result
from acm_compiler.reporting.contents import Child, Markup, Report, headline_budget, is_close, table, tag
from acm_compiler.reporting.map_sections import clips_section, maps_section, texts_section
from acm_compiler.reporting.section_times import times_section
from acm_compiler.reporting.sections import method_section, sites_section
from acm_compiler.reporting.style import style_sheet

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(
    report: Report, cost_picture: Markup, *, clip_picture: Markup | None = None, time_picture: Markup | None = None
) -> str:
    """The whole page around the charts of the metric over cost, of time over budget, and of load over time; what users
    wrote is escaped."""
    found = report.evaluation
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{report.title}: {found.metric.name} over cost"),
        tag("style", Markup(style_sheet())),
    )
    main = tag(
        "main",
        _header(report),
        _cost_section(report.evaluation, cost_picture),
        times_section(report.times, time_picture) if report.times and time_picture else None,
        _load_section(report, clip_picture),
        sites_section(report),
        method_section(report),
        tag("footer", tag("p", f"acm_compiler {found.versions.get('acm_compiler', '')}, {found.date}", class_="quiet")),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', main), lang='en')}\n"


def _load_section(report: Report, clip_picture: Markup | None) -> Markup:
    if report.loads.clips is not None and clip_picture is not None:
        return clips_section(report, clip_picture)
    texts = report.loads.texts
    return maps_section(report) if texts is None else texts_section(report, texts)


def _header(report: Report) -> Markup:
    found, best = report.evaluation, headline_budget(report.evaluation)
    return tag(
        "header",
        tag("p", f"{found.model.rpartition('.')[2]} with adaptive computation modules", class_="kicker"),
        tag("h1", report.title),
        tag("p", report.description, class_="quiet") if report.description else None,
        tag("p", _headline(found, best), class_="lede") if best else None,
        _facts(found, best) if best else None,
    )


def _headline(found: Evaluation, best: BudgetResult) -> str:
    name, dense = found.metric.name, found.metric.dense
    asked, cost = found.names[best.asked], wording.percent(best.model_share)
    start = f"At budget {asked} the model spends {cost} of the dense model's MACs"
    reached = f"and reaches {wording.score(best.metric, name)} {name}"
    if dense is None:
        return f"{start} {reached}. The dense model was not at hand to compare with."
    room = "3 points" if wording.is_share(name) else "3 %"
    if is_close(best, found):
        why = f"It is the cheapest budget measured that stays within {room} of it."
    else:
        why = f"No budget measured stays within {room} of it; this one comes closest."
    return f"{start} {reached}; the dense model reaches {wording.score(dense, name)}. {why}"


def _facts(found: Evaluation, best: BudgetResult) -> Markup:
    name = found.metric.name
    spread = f"{wording.macs_of(best.macs_mean, found.dense_macs)} per example"
    facts = [
        ("Budget asked", found.names[best.asked], f"reached {best.reached:.3f} of the learners' MACs"),
        ("Cost, modelled", wording.percent(best.model_share), spread),
        (f"{name.capitalize()}, measured", wording.score(best.metric, name), wording.count(found.n, "example")),
    ]
    if best.difference is not None:
        low, high = (wording.signed(value, name) for value in (best.difference.low, best.difference.high))
        term = f"To dense, {wording.unit_of_difference(name)}"
        facts.append((term, wording.signed(best.difference.mean, name), f"95 % interval {low} to {high}"))
    return tag(
        "dl",
        *(tag("div", tag("dt", term), tag("dd", value, tag("small", note))) for term, value, note in facts),
        class_="facts",
    )


def _cost_section(found: Evaluation, picture: Markup) -> Markup:
    name = found.metric.name
    return tag(
        "section",
        tag("h2", f"{name.capitalize()} over cost"),
        tag(
            "p",
            "One model, measured at several budgets. A budget is a share of the learners' MACs; the cost of the whole "
            "model also holds what stays dense, and the gates.",
        ),
        tag("figure", tag("div", picture, class_="card"), tag("figcaption", _cost_caption(found))),
        _budget_table(found),
    )


def _cost_caption(found: Evaluation) -> str:
    bars = (
        "Bars: 95 % interval of the difference to the dense model, on the same examples."
        if found.metric.dense is not None
        else f"Bars: 95 % interval of the {found.metric.name}."
    )
    dashed = " The dashed line overrules the gates and gives every token the same k."
    fixed = f"{dashed} To fixed k: {wording.CONTROL}." if found.fixed else ""
    return f"{bars}{fixed} MACs are modelled from the learners that ran; {found.metric.name} is measured."


def _budget_table(found: Evaluation) -> Markup:
    name = found.metric.name
    to_dense = f"to dense, {wording.unit_of_difference(name)}"
    alike = [] if found.metric.likeness is None else [found.metric.likeness]
    control = ["to fixed k"] if found.fixed else []
    cost = ["share of dense MACs", "MACs per example [p5, p95]"]
    headers = ["budget", "reached", name, to_dense, *control, *alike, *cost]
    gates: list[list[Child]] = [
        [found.names[b.asked], *_cells(b, found.metric, [wording.difference(b.over_fixed, name)] * len(control))]
        for b in found.budgets
    ]
    fixed: list[list[Child]] = [[f"every k = {f.k}", *_cells(f, found.metric, [""])] for f in found.fixed]
    between = [""] * (1 + len(control) + len(alike))
    dense = ["dense", "", wording.score(found.metric.dense, name), *between, wording.percent(1.0)]
    return table(
        headers, gates, fixed, [[*dense, wording.macs(found.dense_macs)]], label=f"{name} and cost", class_="wide"
    )


def _cells(result: Result, metric: MetricResult, control: list[str]) -> list[Child]:
    return [
        f"{result.reached:.3f}",
        wording.score(result.metric, metric.name),
        wording.difference(result.difference, metric.name),
        *control,
        *([] if metric.likeness is None else [wording.likeness(result.likeness)]),
        wording.percent(result.model_share),
        _in_two(wording.macs_spread(result.macs_mean, result.macs_p5, result.macs_p95)),
    ]


def _in_two(spread: str) -> str:
    """A mean and its spread, broken between the two where there is no room, and nowhere else."""
    return spread.replace(" ", "\u00a0").replace("\u00a0[", " [")
