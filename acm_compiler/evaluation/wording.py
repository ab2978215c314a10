"""Wording of an evaluation: its numbers, alike in the terminal, in charts and on the page; its table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tabulate import tabulate

from acm_compiler.errors import counted, excluded_text
from acm_compiler.planning.cost_table import unit_of

if TYPE_CHECKING:
    from acm_compiler.evaluation.results import BudgetResult, Evaluation, Interval, MetricResult, Result

CONTROL = "against every token running the same k at the same share; between two k, each on a part of the examples"


def percent(share: float, digits: int = 1) -> str:
    """A share for people: 71.4 %."""
    return f"{100 * share:.{digits}f} %"


def score(value: float | None, metric: MetricResult) -> str:
    """A metric: 91.2 %, or four digits for what is no share; a dash where it is unknown."""
    if value is None:
        return "-"
    return percent(value) if metric.is_share else f"{value:.4g}"


def difference(found: Interval | None, metric: MetricResult) -> str:
    """A difference of metrics and half of its 95 % interval, in points for shares: −0.8 ± 0.5.

    The difference alone where it is infinite, as those of perplexities may be; a dash where there is none.
    """
    if found is None or math.isnan(found.mean):
        return "-"
    half = (found.high - found.low) / 2
    if not math.isfinite(half):
        return signed(found.mean, metric)
    return f"{signed(found.mean, metric)} ± {f'{100 * half:.1f}' if metric.is_share else f'{half:.2g}'}"


def signed(value: float, metric: MetricResult) -> str:
    """A difference with its sign, in points for shares: −0.8."""
    text = f"{100 * value:+.1f}" if metric.is_share else f"{value:+.3g}"
    return f"−{text[1:]}" if text.startswith("-") else text


def likeness(value: float | None) -> str:
    """Agreement of two models' outputs as text, 1.000 being the same."""
    return "-" if value is None else f"{value:.3f}"


def unit_of_difference(metric: MetricResult) -> str:
    """Unit of a difference in the metric."""
    return "points" if metric.is_share else metric.name


def macs(value: float) -> str:
    """MACs in the unit that reads best: 11.0 GMACs."""
    unit, scale = unit_of(value)
    return f"{value / scale:.3g} {unit}"


def macs_of(value: float, whole: float) -> str:
    """MACs spent, and the dense model's, in one unit: 4.39 MMACs, dense 8.36 MMACs."""
    unit, scale = unit_of(whole)
    return f"{value / scale:.3g} {unit}, dense {whole / scale:.3g} {unit}"


def macs_spread(mean: float, low: float, high: float) -> str:
    """Mean and 5th to 95th percentile in one unit: 11.0 GMACs [9.8, 12.1]."""
    unit, scale = unit_of(mean)
    return f"{mean / scale:.2f} {unit} [{low / scale:.2f}, {high / scale:.2f}]"


def ratio(value: float, error: float) -> str:
    """A ratio and its standard error: 1.523 ± 0.016."""
    digits = 3 if error == 0 or error >= 1e-3 else 4
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def budget_names(budgets: Iterable[float]) -> dict[float, str]:
    """Name of each budget beside the others: 0.25, with as many decimals as tell all of them apart."""
    asked = list(dict.fromkeys(budgets))
    for digits in range(2, 7):
        names = {budget: f"{budget:.{digits}f}" for budget in asked}
        if len(set(names.values())) == len(names):
            break
    return names


def versions_text(versions: Mapping[str, str]) -> str:
    """Versions that a measurement was made with: python 3.11.4, torch 2.14.1."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


_NEAR = 0.01


SHARE, SPREAD = "model share", "MACs per example [p5, p95]"


class Column(NamedTuple):
    """Column of a table: its text for a result, and for the dense model."""

    of: Callable[[Result], str]
    of_dense: str = ""


def columns(found: Evaluation) -> dict[str, Column]:
    """The columns of a table of results, by their headings."""
    metric = found.metric
    cells = {
        "reached": Column(lambda r: f"{r.reached:.3f}"),
        SHARE: Column(lambda r: percent(r.model_share), percent(1.0)),
        SPREAD: Column(lambda r: macs_spread(r.macs_mean, r.macs_p5, r.macs_p95), macs(found.dense_macs)),
        metric.name: Column(lambda r: score(r.metric, metric), score(metric.dense, metric)),
        f"to dense, {unit_of_difference(metric)}": Column(lambda r: difference(r.difference, metric)),
    }
    if found.fixed:
        cells["to fixed k"] = Column(lambda r: difference(r.over_fixed, metric) if hasattr(r, "over_fixed") else "")
    if metric.likeness is not None:
        cells[metric.likeness] = Column(lambda r: likeness(r.likeness))
    return cells


def evaluation_table(found: Evaluation) -> str:
    """Budgets, then fixed k, then the dense model, with what was measured and on how many examples."""
    shown = columns(found)
    named: list[tuple[str, Result]] = [(_asked(budget, found.names), budget) for budget in found.budgets]
    named += [(f"k = {fixed.k}", fixed) for fixed in found.fixed]
    rows = [[name, *(column.of(result) for column in shown.values())] for name, result in named]
    rows.append(["dense", *(column.of_dense for column in shown.values())])
    table = tabulate(rows, headers=["budget", *shown], disable_numparse=True, colalign=("right",) * (1 + len(shown)))
    excluded = [f"counted nowhere: {excluded_text(found.left_out)}"] if found.left_out else []
    control = [f"to fixed k: {CONTROL}"] if found.fixed else []
    return "\n".join([table, _basis(found), *excluded, *control, *_foreground(found), *_missed(found)])


def _asked(budget: BudgetResult, names: Mapping[float, str]) -> str:
    """The share asked for, after what was asked where that was no share."""
    share = names[budget.asked]
    return share if budget.asked_as is None else f"{budget.asked_as} = {share}"


def _basis(found: Evaluation) -> str:
    sources = "" if found.groups == found.n else f" from {counted(found.groups, 'source')}"
    return (
        f"{found.metric.name} measured on {counted(found.n, 'example')}{sources}, ± half of a 95 % interval "
        "over sources; MACs modelled: what these examples ran, gates included"
    )


def _foreground(found: Evaluation) -> list[str]:
    lines = []
    for budget in found.budgets:
        use = budget.foreground
        if use is not None and budget.reached < 1:
            found_ratio = ratio(use.ratio, use.ratio_error)
            control = ratio(use.shuffled, use.shuffled_error)
            what = "mean k on the foreground over mean k on the background"
            in_macs = "" if use.macs is None else f", in MACs {use.macs:.3f}"
            lines.append(
                f"budget {found.names[budget.asked]}: {what} {found_ratio}{in_macs}; k shuffled over {use.of} {control}"
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
            lines.append(f"budget {missed}: the table of knobs was measured on other examples")
    return lines
