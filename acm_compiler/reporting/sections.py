"""Sections of the page: how its numbers were made, loads on foreground and background, the table of sites."""

from __future__ import annotations

from acm_compiler.data.audio import told
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import BudgetResult, DenseFrom, Evaluation, Places, SiteUse
from acm_compiler.evaluation.statistics import DRAWS
from acm_compiler.planning.cost import site_cost
from acm_compiler.reporting.contents import Child, Markup, Report, headline_budget, table, tag
from acm_compiler.reporting.figures import colours_of_k, key_of_k

_DENSE: dict[DenseFrom | None, str] = {
    "original": "The model before conversion, run on the same examples.",
    "regions": "The dense regions that the sites replaced, run inside today's model: the model before conversion as "
    "long as nothing else was trained.",
    "recorded": "Measured earlier, when the model was converted; not on this run's examples, so no interval is given.",
    None: "Not measured: the dense regions are not kept with the model, and the original was not at hand.",
}


def method_section(report: Report) -> Markup:
    """What was measured, what was modelled, on how many examples, with which versions."""
    terms = [
        ("Measured", _measured(report.evaluation)),
        ("Modelled", _modelled(report)),
        ("Intervals", _intervals(report.evaluation)),
        ("Dense model", _DENSE[report.evaluation.metric.dense_from]),
        ("Budget", _budget(report.evaluation)),
        ("Padding", _padding(report.evaluation)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in report.evaluation.versions.items())),
    ]
    pairs = [part for term, text in terms for part in (tag("dt", term), tag("dd", text))]
    return tag("section", tag("h2", "How this was measured"), tag("dl", *pairs, class_="terms"))


def _measured(found: Evaluation) -> str:
    what = f"{found.metric.name.capitalize()} of {found.model.rpartition('.')[2]}"
    of_no_use = f" Examples of no use, which count nowhere: {told(found.left_out)}." if found.left_out else ""
    examples = wording.count(found.n, "example")
    return f"{what} on {examples}, every budget on the same ones, and the k that each token ran.{of_no_use}"


def _modelled(report: Report) -> str:
    not_counted = ", ".join(report.plan.model.not_counted)
    left_out = f" Not counted: {not_counted}." if not_counted else ""
    return (
        "MACs (1 MAC = 1 multiply-add = 2 FLOPs), by arithmetic: the learners that ran, all gates, and what stays "
        "dense, each example by its own length; those of the dense model likewise."
        f"{left_out} MACs are not time; {_time(report)}."
    )


def _time(report: Report) -> str:
    return "acmc bench measures time" if report.times is None else "time was measured by acmc bench"


def _intervals(found: Evaluation) -> str:
    if found.groups == found.n:
        drawn = "the examples"
    else:
        drawn = f"the {wording.count(found.groups, 'source')} that the examples come from"
    return (
        f"95 % bootstrap intervals, {DRAWS:,} draws of {drawn}. Differences to the dense model are paired: "
        "both answered the same examples."
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


def _padding(found: Evaluation) -> str:
    return "Left out of every count." if found.masked else "No padding mask was given: all tokens count."


# of a place: what it is part of, what it shows, and what else there is
_WORDS: dict[Places, tuple[str, str, str]] = {
    "patches": ("picture", "object", "background"),
    "frames": ("clip", "speech", "silence"),
}


def foreground_part(report: Report) -> Markup | None:
    """Mean k on the object or speech, and off it, at every budget, with the shuffled control; None if not known."""
    rows = _rows(report.evaluation)
    if not rows:
        return None
    places = next(b.foreground.of for b in report.evaluation.budgets if b.foreground is not None)
    whole, what, other = _WORDS[places]
    text = (
        f"Mean k over {places} that hold {'a part of the object' if places == 'patches' else what}, against "
        f"{'the ' if places == 'patches' else ''}{other}. As a control, the same k are shuffled over the {places} of "
        f"each {whole}: then the ratio must be 1. ± is one standard error."
    )
    on = f"k on the {what}" if places == "patches" else f"k on {what}"
    headers = ["budget", on, f"k on {other}", "ratio", "ratio when shuffled"]
    return tag(
        "div",
        tag("h3", f"{what.capitalize()} against {other}"),
        tag("p", text),
        table(headers, rows, label=f"k on {what} and on {other}"),
    )


def _rows(found: Evaluation) -> list[list[Child]]:
    return [
        [
            found.names[b.asked],
            f"{b.foreground.on:.2f}",
            f"{b.foreground.off:.2f}",
            wording.ratio(b.foreground.ratio, b.foreground.ratio_error),
            wording.ratio(b.foreground.shuffled, b.foreground.shuffled_error),
        ]
        for b in found.budgets
        if b.foreground is not None and b.reached < 1
    ]


def sites_section(report: Report) -> Markup:
    """One row per site, with a stacked bar of k for every budget."""
    budgets, names, sites = report.evaluation.budgets, report.evaluation.names, report.plan.sites
    compared = _compared(report)
    shared = shared_start([site.name for site in sites])
    headers = ["site", *(f"budget {names[b.asked]}" for b in budgets)]
    headers += [f"{_ratio_name(compared)} at {names[compared.asked]}"] if compared else []
    headers += ["kind", "learners", "k", "share of all MACs"]
    rows = [_row(report, index, site.name.removeprefix(shared), compared) for index, site in enumerate(sites)]
    start = f" All names start with “{shared}”, left out here." if shared else ""
    return tag(
        "section",
        tag("h2", f"What {wording.count(len(rows), 'site')} did"),
        tag(
            "p",
            "A site is an MLP or a projection that was replaced by learners and a gate. Bars: the share of its tokens "
            f"that ran k learners. Below each bar, its share of its own learner MACs.{start}",
        ),
        _legend([site.learners for site in sites]),
        table(headers, rows, label="sites", class_="wide"),
        *_damages(report.damages, shared),
    )


def _damages(damages: dict[str, dict[int, float]], shared: str) -> list[Markup]:
    """Which sites matter: the expected damage of every k."""
    if not damages:
        return []
    every_k = sorted({k for of_site in damages.values() for k in of_site})
    rows: list[list[Child]] = [
        [name.removeprefix(shared), *(f"{of_site[k]:.1e}" if k in of_site else "" for k in every_k)]
        for name, of_site in damages.items()
    ]
    text = (
        "Which sites matter, as calibration found it: the squared change of the model's answer over its squared norm, "
        "to first order, if every token ran k learners at that site alone."
    )
    return [tag("p", text), table(["expected damage", *(f"k = {k}" for k in every_k)], rows, label="expected damage")]


def shared_start(names: list[str]) -> str:
    """What all names start with, up to a dot or underscore; empty for a single name."""
    length = 0
    while len(names) > 1 and len({name[: length + 1] for name in names}) == 1 and length < len(names[0]):
        length += 1
    start = names[0][:length]
    return start[: max(start.rfind("."), start.rfind("_")) + 1]


def _row(report: Report, index: int, name: str, compared: BudgetResult | None) -> list[Child]:
    site = report.plan.sites[index]
    cells: list[Child] = [name, *(_bar(budget.per_site[index]) for budget in report.evaluation.budgets)]
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


def _bar(site: SiteUse) -> Markup:
    total = max(1, sum(site.tokens_by_k))
    shares = [tokens / total for tokens in site.tokens_by_k]
    colours = colours_of_k(len(shares) - 1)
    parts = [
        tag("i", style=f"width:{100 * share:.1f}%;background:{colour}")
        for share, colour in zip(shares, colours, strict=True)
        if share > 0
    ]
    spoken = ", ".join(f"k = {k}: {share:.0%}" for k, share in enumerate(shares) if share > 0)
    return Markup(tag("div", *parts, class_="bar", role="img", aria_label=spoken, title=spoken) + f"{site.share:.2f}")


def _legend(learners: list[int]) -> Markup:
    items = [tag("li", tag("i", style=f"background:{colour}"), label) for label, colour in key_of_k(learners)]
    return tag("ul", *items, class_="legend", aria_label="colours of k")
