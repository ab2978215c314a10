"""How numbers are written for people: the same on the command line, in charts and on the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from acm_compiler.planning.cost_table import unit_of

if TYPE_CHECKING:
    from acm_compiler.evaluation.results import Interval, MetricResult

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
    """A difference of metrics and half of its 95 % interval, in points for shares: −0.8 ± 0.5."""
    if found is None:
        return "-"
    half = (found.high - found.low) / 2
    return f"{signed(found.mean, metric)} ± {100 * half:.1f}" if metric.is_share else f"{found.mean:+.3g} ± {half:.2g}"


def signed(value: float, metric: MetricResult) -> str:
    """A difference with its sign, in points for shares: −0.8."""
    text = f"{100 * value:+.1f}" if metric.is_share else f"{value:+.3g}"
    return text.replace("-", "−")


def likeness(value: float | None) -> str:
    """How alike two models answer, 1 being the same."""
    return "-" if value is None else f"{value:.3f}"


def unit_of_difference(metric: MetricResult) -> str:
    """What a difference is counted in."""
    return "points" if metric.is_share else metric.name


def macs(value: float) -> str:
    """MACs in the unit that reads best: 11.0 GMACs."""
    unit, scale = unit_of(value)
    return f"{value / scale:.3g} {unit}"


def macs_of(value: float, whole: float) -> str:
    """What was spent, and the dense model's MACs, in one unit: 4.39 MMACs, dense 8.36 MMACs."""
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
    """What each budget is called beside the others: 0.25, with as many decimals as tell all of them apart."""
    asked = list(dict.fromkeys(budgets))
    for digits in range(2, 7):
        names = {budget: f"{budget:.{digits}f}" for budget in asked}
        if len(set(names.values())) == len(names):
            break
    return names


def count(number: int, noun: str) -> str:
    """Thousands apart, and the noun in its number: 10,800 examples."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
