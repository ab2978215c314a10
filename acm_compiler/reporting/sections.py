"""The page's account of how its numbers came about."""

from __future__ import annotations

from acm_compiler.data.audio import told
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import DenseFrom, Evaluation
from acm_compiler.evaluation.statistics import DRAWS
from acm_compiler.reporting.contents import Report
from acm_compiler.reporting.markup import Markup, tag

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
