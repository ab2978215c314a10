"""How the page's numbers were made."""

from __future__ import annotations

from acm_compiler.data.audio import told
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import DenseFrom, Evaluation
from acm_compiler.evaluation.statistics import DRAWS
from acm_compiler.reporting.contents import Report

_DENSE: dict[DenseFrom | None, str] = {
    "original": "The model before conversion, run on the same examples.",
    "regions": "The dense regions that the sites replaced, run inside today's model: the model before conversion as "
    "long as nothing else was trained.",
    "recorded": "Measured earlier, when the model was converted; not on this run's examples, so no interval is given.",
    None: "Not measured: the dense regions are not kept with the model, and the original was not at hand.",
}


def method_facts(report: Report) -> dict[str, str]:
    """What was measured, what was modelled, on how many examples, with which versions."""
    found = report.evaluation
    return {
        "Measured": _measured(found),
        "Modelled": _modelled(report),
        "Intervals": _intervals(found),
        "Dense model": _DENSE[found.metric.dense_from],
        "Budget": _budget(found),
        "Padding": "Left out of every count." if found.masked else "No padding mask was given: all tokens count.",
        "Versions": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }


def _measured(found: Evaluation) -> str:
    what = f"{found.metric.name.capitalize()} of {found.model.rpartition('.')[2]}"
    excluded = f" Excluded examples, which count nowhere: {told(found.left_out)}." if found.left_out else ""
    examples = wording.count(found.n, "example")
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
        drawn = f"the {wording.count(found.groups, 'source')} that the examples come from"
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
