"""An evaluation as the text table that `acmc eval` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tabulate import tabulate

from acm_compiler.data.audio import told
from acm_compiler.evaluation import wording

if TYPE_CHECKING:
    from acm_compiler.evaluation.results import BudgetResult, Evaluation, MetricResult, Result

_NEAR = 0.01


def evaluation_table(found: Evaluation) -> str:
    """Budgets, then fixed k, then the dense model, with what was measured and on how many examples."""
    name = found.metric.name
    rows = [[_asked(b, found.names), f"{b.reached:.3f}", *_row(b, found.metric)] for b in found.budgets]
    rows += [[f"k = {f.k}", f"{f.reached:.3f}", *_row(f, found.metric)] for f in found.fixed]
    dense = [wording.percent(1.0), wording.macs(found.dense_macs), wording.score(found.metric.dense, found.metric)]
    rows.append(["dense", "", *dense, ""])
    headers = [
        "budget",
        "reached",
        "model share",
        "MACs per example [p5, p95]",
        name,
        f"to dense, {wording.unit_of_difference(found.metric)}",
    ]
    if found.fixed:
        headers.append("to fixed k")
        shown = [wording.difference(budget.over_fixed, found.metric) for budget in found.budgets]
        rows = [[*row, cell] for row, cell in zip(rows, [*shown, *[""] * (len(found.fixed) + 1)], strict=True)]
    if found.metric.likeness is not None:
        headers.append(found.metric.likeness)
        shown = [wording.likeness(result.likeness) for result in (*found.budgets, *found.fixed)]
        rows = [[*row, cell] for row, cell in zip(rows, [*shown, ""], strict=True)]
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=("right",) * len(headers))
    notes = [_basis(found), *_left_out(found), *_control(found), *_foreground(found), *_missed(found)]
    return "\n".join([table, *notes])


def _asked(budget: BudgetResult, names: Mapping[float, str]) -> str:
    """The share asked for, after what was asked where that was no share."""
    share = names[budget.asked]
    return share if budget.asked_as is None else f"{budget.asked_as} = {share}"


def _row(result: Result, metric: MetricResult) -> list[str]:
    return [
        wording.percent(result.model_share),
        wording.macs_spread(result.macs_mean, result.macs_p5, result.macs_p95),
        wording.score(result.metric, metric),
        wording.difference(result.difference, metric),
    ]


def _basis(found: Evaluation) -> str:
    sources = "" if found.groups == found.n else f" from {wording.count(found.groups, 'source')}"
    return (
        f"{found.metric.name} measured on {wording.count(found.n, 'example')}{sources}, ± half of a 95 % interval "
        "over sources; MACs modelled: what these examples ran, gates included"
    )


def _left_out(found: Evaluation) -> list[str]:
    return [f"counted nowhere: {told(found.left_out)}"] if found.left_out else []


def _control(found: Evaluation) -> list[str]:
    return [f"to fixed k: {wording.CONTROL}"] if found.fixed else []


def _foreground(found: Evaluation) -> list[str]:
    lines = []
    for budget in found.budgets:
        use = budget.foreground
        if use is not None and budget.reached < 1:
            ratio = wording.ratio(use.ratio, use.ratio_error)
            control = wording.ratio(use.shuffled, use.shuffled_error)
            what = "mean k on the foreground over mean k on the background"
            macs = "" if use.macs is None else f", in MACs {use.macs:.3f}"
            lines.append(
                f"budget {found.names[budget.asked]}: {what} {ratio}{macs}; k shuffled over {use.of} {control}"
            )
    return lines


def _missed(found: Evaluation) -> list[str]:
    lines = []
    for b in found.budgets:
        expected = b.asked if b.expected is None else b.expected
        if b.asked - expected > _NEAR:
            lines.append(
                f"budget {found.names[b.asked]}: no knob of these gates leads there; "
                f"the next below it spends {expected:.3f}"
            )
        if abs(b.reached - expected) > _NEAR:
            missed = f"{expected:.2f} was missed by {b.reached - expected:+.3f}"
            lines.append(f"budget {missed}: the table of knobs was measured on other data")
    return lines
