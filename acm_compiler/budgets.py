"""From a budget to the run-time choices that reach it, by the model's measured table (DECISIONS 6, 7, 14)."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from numbers import Real

from acm_compiler.conversion import BudgetTable, Conversion
from acm_compiler.errors import BudgetUnreachable, NoBudgetTable, UsageError
from acm_compiler.plans import Plan

TOLERANCE = 1e-6
_WITH_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(?:(%)|([kMGT])?MACs?)\s*")
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a budget means to the gates: the knob, the lowest k, and the share of learner MACs expected."""

    knob: float
    k_lo: int
    share: float


def is_number(value: object) -> bool:
    """Whether `value` is a number, of Python or NumPy."""
    return isinstance(value, Real) and not isinstance(value, bool)


def parse_budget(budget: float | str, plan: Plan) -> float:
    """The share of learner MACs that `budget` asks for.

    A number is that share. "60%" is a share of the whole dense model's MACs, "11 GMACs" an absolute cost, both
    for the plan's example inputs. UsageError for anything else.
    """
    if is_number(budget):
        return float(budget)
    found = _WITH_UNIT.fullmatch(str(budget))
    if not found:
        raise UsageError(
            "a budget that cannot be read",
            found=repr(budget),
            expected="a share such as 0.4, '60%', or '11 GMACs'",
            fix="1 MAC is 2 FLOPs; what papers call GFLOPs of a model are GMACs" if "FLOP" in str(budget) else None,
        )
    number, facts = float(found[1]), plan.model
    macs = number / 100 * facts.dense_macs if found[2] else number * _PREFIX[found[3] or ""] * facts.batch
    return plan.cost.budget_of_macs(macs)


def setting_of(owner: Conversion, asked: float | str) -> Setting:
    """The choices that reach the budget `asked` for, by interpolation in the table; budget 1 runs every learner.

    Raises NoBudgetTable where nothing was measured and BudgetUnreachable, with the range, outside what it covers.
    """
    budget = parse_budget(asked, owner.plan)
    if not owner.table_min - TOLERANCE <= budget <= 1 + TOLERANCE:
        raise unreachable(asked, owner.plan, low=owner.table_min)
    if budget >= 1 - TOLERANCE:
        return Setting(knob=0.0, k_lo=max(site.learners for site in owner.plan.sites), share=1.0)
    table = owner.table
    if table is None:
        raise NoBudgetTable(
            "this model's gates have not been measured, so no setting belongs to this budget",
            found=asked,
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


def unreachable(asked: float | str, plan: Plan, *, low: float, where: str | None = None) -> BudgetUnreachable:
    """The refusal of a budget that is not between the shares `low` and 1, in its own unit; `where` it was asked for."""
    expected = f"{low:.3f} to 1 (share of learner MACs)"
    unit = _WITH_UNIT.fullmatch(asked) if isinstance(asked, str) else None
    if unit:
        least, most = (_in_unit(plan, share, unit) for share in (low, 1.0))
        expected = f"{least} to {most}, gates included; as a share of learner MACs {low:.3f} to 1"
    return BudgetUnreachable(
        "no setting of this model reaches this budget",
        where=where,
        found=asked if isinstance(asked, str) else f"{asked:.4g}",
        expected=expected,
        fix="ask for a budget in that range; convert more sites, or allow k = 0 where a residual bypasses, to lower it",
    )


def _in_unit(plan: Plan, share: float, unit: re.Match[str]) -> str:
    """A share of learner MACs as what the whole model costs then, in the unit of a budget."""
    if unit[2]:
        return f"{plan.cost.model_share(share):.1%}"
    prefix = unit[3] or ""
    return f"{plan.cost.macs(share) / plan.model.batch / _PREFIX[prefix]:.4g} {prefix}MACs"
