"""From a budget to the run-time choices that reach it, by the model's measured table (DECISIONS 6, 7, 14)."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

from acm_compiler.conversion import BudgetTable, Conversion
from acm_compiler.errors import BudgetUnreachable, NoBudgetTable, UsageError

TOLERANCE = 1e-6
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a budget means to the gates: the knob, the lowest k, and the share of learner MACs expected."""

    knob: float
    k_lo: int
    share: float


def parse_budget(budget: float | str, owner: Conversion) -> float:
    """The share of learner MACs that `budget` asks for.

    A number is that share. "60%" is a share of the whole dense model's MACs, "11 GMACs" an absolute cost, both
    for the plan's example inputs. UsageError for anything else.
    """
    if isinstance(budget, (int, float)) and not isinstance(budget, bool):
        return float(budget)
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(?:(%)|([kMGT])?MACs?)\s*", str(budget))
    if not found:
        raise UsageError(
            "a budget that cannot be read", found=repr(budget), expected="a share such as 0.4, '60%', or '11 GMACs'"
        )
    number, facts = float(found[1]), owner.plan.model
    macs = number / 100 * facts.dense_macs if found[2] else number * _PREFIX[found[3] or ""] * facts.batch
    return owner.plan.cost.budget_of_macs(macs)


def setting_of(owner: Conversion, budget: float) -> Setting:
    """The choices that reach `budget`, by interpolation in the table; budget 1 runs every learner.

    Raises NoBudgetTable where nothing was measured and BudgetUnreachable, with the range, outside what it covers.
    """
    if not owner.table_min - TOLERANCE <= budget <= 1 + TOLERANCE:
        raise unreachable(budget, owner.table_min)
    if budget >= 1 - TOLERANCE:
        return Setting(knob=0.0, k_lo=max(site.learners for site in owner.plan.sites), share=1.0)
    table = owner.table
    if table is None:
        raise NoBudgetTable(
            "this model's gates have not been measured, so no setting belongs to this budget",
            found=budget,
            fix="run a recipe's gate phase, or acm.calibrate(model, batches); acm.set_k(model, k) works without gates",
        )
    return _interpolate(table, budget)


def _interpolate(table: BudgetTable, budget: float) -> Setting:
    """Between two points the knob is linear in the share; above the highest share reached, that one holds."""
    points = table.points
    shares = [point.share for point in points]
    right = bisect_right(shares, budget)
    if right in (0, len(points)):
        end = points[0] if right == 0 else points[-1]
        return Setting(knob=end.knob, k_lo=end.k_lo, share=end.share)
    low, high = points[right - 1], points[right]
    weight = (budget - low.share) / (high.share - low.share)
    knob = low.knob + weight * (high.knob - low.knob)
    return Setting(knob=knob, k_lo=low.k_lo, share=budget)


def unreachable(budget: float, low: float, *, where: str | None = None) -> BudgetUnreachable:
    """The refusal of a budget that is not between `low` and 1; `where` it was asked for."""
    return BudgetUnreachable(
        "no setting of this model reaches this budget",
        where=where,
        found=f"{budget:.4g}",
        expected=f"{low:.3f} to 1 (share of learner MACs)",
        fix="ask for a budget in that range; convert more sites, or allow k = 0 where a residual bypasses, to lower it",
    )
