"""From a budget to the run-time choices that reach it, by the model's measured table (docs/semantics.md, Budgets)."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acm_compiler.errors import BudgetUnreachable, NoBudgetTable, NothingToConvert, UsageError
from acm_compiler.passes.rewrite.conversion import BudgetTable, Conversion
from acm_compiler.planning.plan import Plan

TOLERANCE = 1e-6
# shares are printed with three decimals, or more
PRINTED = 5.001e-4
# how well the table's rows meet the budgets that they were made for
NEAR = 0.002
_WITH_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(?:(%)|([kMGT])?MACs?)\s*")
_UNTYPED = re.compile(r"\s*([0-9]*[.,]?[0-9]+)\s*(percent)?\s*")
_ALL = "1 runs every learner: there is nothing more that this model could spend"
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting of the gates for a budget: the knob, the lowest k, and the share of learner MACs expected."""

    knob: float
    k_lo: int
    share: float


def is_number(value: object) -> bool:
    """True if `value` is a number, of Python or NumPy."""
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
            fix=_reading(budget),
        )
    number, facts = float(found[1]), plan.model
    macs = number / 100 * facts.dense_macs if found[2] else number * _PREFIX[found[3] or ""] * facts.batch
    return plan.cost.budget_of_macs(macs)


def list_of_budgets(given: Iterable[Any]) -> list[Any]:
    """The budgets in `given`; UsageError for one budget alone, and for what lists none."""
    with contextlib.suppress(TypeError):  # arrays without an axis say only when they are read that they are no list
        if not isinstance(given, (str, Mapping)):
            return list(given)
    raise UsageError(
        "budgets must be a list",
        found=repr(given) if isinstance(given, (str, Real)) else type(given).__name__,
        expected="shares such as [0.4, 0.6], or texts such as ['60%']",
        fix=f"one budget alone: [{given!r}]" if isinstance(given, str) or is_number(given) else None,
    )


def shares_of(owner: Conversion, budgets: Sequence[float | str]) -> tuple[float, ...]:
    """The `budgets` that a user will ask for, as shares of learner MACs, and the model's own default, if it has one.

    UsageError; BudgetUnreachable for one that no setting reaches.
    """
    if isinstance(budgets, str) or not isinstance(budgets, Sequence):
        raise UsageError("budgets must be a list", found=repr(budgets), expected="such as [0.25, 0.4, '60%']")
    plan, shares = owner.plan, []
    least = plan.cost.budget_min
    for budget in budgets:
        share = share_within(budget, plan, low=0.0) or parse_budget(budget, plan)
        if isinstance(budget, str) and not 0 < share <= 1:
            raise unreachable(budget, plan, low=least)
        if not 0 < share <= 1:
            fix = too_much(budget, plan, low=least) if share > 1 else None
            raise UsageError("a budget must be a share of learner MACs in (0, 1]", found=share, fix=fix)
        shares.append(share)
    refuse_unreachable(plan, ((None, budget) for budget in budgets))
    return tuple(shares) if owner.default_budget is None else (*shares, owner.default_budget)


def share_within(budget: float | str, plan: Plan, *, low: float) -> float | None:
    """The share of learner MACs that `budget` asks for; None outside of `low` to 1.

    What is an end of that range, rounded as our tables and messages print it, is that end.
    """
    share = parse_budget(budget, plan)
    if low - TOLERANCE <= share <= 1 + TOLERANCE:
        return share
    end = low if share < low else 1.0
    return end if _is_printed(budget, plan, end) else None


def _is_printed(budget: float | str, plan: Plan, end: float) -> bool:
    """True if `budget` is the share `end` in its own unit, rounded to as many digits as it has."""
    unit = None if is_number(budget) else _WITH_UNIT.fullmatch(str(budget))
    if unit is None:
        return abs(float(budget) - end) <= PRINTED
    exact = 100 * plan.cost.model_share(end)
    if not unit[2]:
        exact = plan.cost.macs(end) / plan.model.batch / _PREFIX[unit[3] or ""]
    digits = unit[1].lstrip("0.").replace(".", "")
    decimals = len(unit[1].partition(".")[2])
    return round(exact, decimals) == float(unit[1]) and (bool(unit[2]) or len(digits) > 1)


def _reading(text: object) -> str | None:
    """Likely meaning of a budget that cannot be read."""
    if "FLOP" in str(text):
        return "1 MAC is 2 FLOPs; what papers call GFLOPs of a model are GMACs"
    found = _UNTYPED.fullmatch(str(text))
    if not found:
        return None
    number = float(found[1].replace(",", "."))
    return _in_percent(number) if found[2] or number > 1 else f"a share is a number, without quotes: {number:g}"


def _in_percent(number: float, *, of_model: bool = True, of_learners: bool = True) -> str:
    """The question whether percent were meant, of what they can be."""
    model = [f"'{number:g}%', of the whole model's MACs"] if of_model else []
    learners = [f"{number / 100:g}, of the learners'"] if of_learners else []
    meant = ", or ".join(model + learners)
    return f"did you mean {meant}?" if meant else _ALL


def setting_of(owner: Conversion, asked: float | str) -> Setting:
    """The choices that reach the budget `asked` for, by interpolation in the table; budget 1 runs every learner.

    Raises NoBudgetTable where nothing was measured and BudgetUnreachable, with the range, outside what it covers.
    """
    budget = share_within(asked, owner.plan, low=owner.table_min)
    if budget is None:
        raised = owner.table is not None and owner.table.points[0].k_lo > 0
        raise unreachable(asked, owner.plan, low=owner.table_min, raised=raised)
    if budget >= 1 - TOLERANCE:
        return Setting(knob=0.0, k_lo=max(site.learners for site in owner.plan.sites), share=1.0)
    table = owner.table
    if table is None:
        raise NoBudgetTable(
            "this model's gates have not been measured, so no setting belongs to this budget",
            found=asked,
            fix="run a recipe's gate phase, or acm.calibrate(model, batches); acm.set_k(model, k) works without gates",
        )
    knob, k_lo, share = interpolate(rows_of(table), torch.tensor([budget], dtype=torch.float64, device="cpu"))
    return Setting(knob=float(knob), k_lo=int(k_lo), share=float(share))


class Rows(NamedTuple):
    """The rows of a budget table as tensors, in order of rising share: float64, int32 k_lo, and True where it jumps."""

    share: Tensor
    knob: Tensor
    k_lo: Tensor
    jumps: Tensor


def rows_of(table: BudgetTable) -> Rows:
    """The rows of `table`, on the CPU."""
    points = table.points
    return Rows(
        torch.tensor([point.share for point in points], dtype=torch.float64, device="cpu"),
        torch.tensor([point.knob for point in points], dtype=torch.float64, device="cpu"),
        torch.tensor([point.k_lo for point in points], dtype=torch.int32, device="cpu"),
        torch.tensor([point.share in table.jumps for point in points], device="cpu"),
    )


def interpolate(rows: Rows, budgets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Knob, lowest k and expected share, [B] each, for budgets below 1, float64 [B].

    Between two rows the knob is linear in the share; above the highest share reached, that one holds. Where the share
    jumps from one row to the next, the lower one holds for all budgets before the higher one's.
    """
    right = (rows.share <= budgets[:, None]).sum(1)
    low, high = (right - 1).clamp(min=0), right.clamp(max=rows.share.shape[0] - 1)
    low_share, high_share, jumps = rows.share[low], rows.share[high], rows.jumps[low]
    between = (low < high) & ~jumps
    end = torch.where(jumps & (high_share - budgets <= NEAR), high, low)
    weight = torch.where(between, (budgets - low_share) / torch.where(between, high_share - low_share, 1), 0)
    knob = rows.knob[end] + weight * (rows.knob[high] - rows.knob[low])
    return knob, rows.k_lo[end], torch.where(between, budgets, rows.share[end])


def unreachable(
    asked: float | str, plan: Plan, *, low: float, where: str | None = None, raised: bool = False
) -> BudgetUnreachable:
    """The refusal of a budget that is not between the shares `low` and 1, in its own unit; `where` it was asked for.

    raised: calibration has raised the lowest k.
    """
    least_share = f"{low:.3f}"
    expected = f"{least_share} to 1 (share of learner MACs)"
    unit = _WITH_UNIT.fullmatch(asked) if isinstance(asked, str) else None
    if unit:
        least, most = _in_unit(plan, low, unit, up=True), _in_unit(plan, 1.0, unit, up=False)
        expected = f"{least} to {most}, gates included; as a share of learner MACs {least_share} to 1"
    share = parse_budget(asked, plan)
    if share < low:
        fix = _below(asked, plan, low=low, raised=raised and share >= plan.cost.budget_min - TOLERANCE)
    else:
        fix = too_much(asked, plan, low=low)
    return BudgetUnreachable(
        "no setting of this model reaches this budget",
        where=where,
        found=asked if isinstance(asked, str) else f"{asked:.4g}",
        expected=expected,
        fix=fix,
    )


def refuse_unreachable(plan: Plan, budgets: Iterable[tuple[str | None, float | str]]) -> None:
    """Refuse, before anything is trained, a plan that cannot become what is asked for.

    budgets: where each was asked for, and its value as `acm.set_budget` takes it.
    NothingToConvert without sites, BudgetUnreachable.
    """
    if not plan.sites:
        raise NothingToConvert(
            "this model has no site that can become an ACM",
            found=f"{len(plan.skipped)} look-alikes, see `kept dense` above",
            fix="docs/models.md says what is found in which models",
        )
    low, _ = plan.budget_range
    for where, budget in budgets:
        if share_within(budget, plan, low=low) is None:
            raise unreachable(budget, plan, low=low, where=where)


def too_much(asked: float | str, plan: Plan, *, low: float) -> str:
    """Likely meaning of a budget above 1, or of none at all; `low`: the least share in reach."""
    most = max(site.learners for site in plan.sites)
    if not isinstance(asked, str) and not math.isfinite(asked):
        return "a budget is a finite number: the share of the learners' MACs to spend"
    if isinstance(asked, str) or not 2 <= asked <= 100:
        return _ALL
    if asked <= most and asked == int(asked):
        return f"a budget is a share; for {asked:g} learners at every token: acm.set_k(model, {asked:g})"
    share = parse_budget(f"{asked:g}%", plan)
    return _in_percent(asked, of_model=low <= share <= 1, of_learners=low <= asked / 100)


def _below(asked: float | str, plan: Plan, *, low: float, raised: bool) -> str:
    if raised:
        return (
            f"calibrate raised the lowest k; acm.calibrate(model, batches, budgets=[{asked!r}]) keeps it within reach"
        )
    if is_number(asked) and float(asked) < 0:
        return f"{low:.3f} is the least: every token at the lowest k of its sites"
    if all(site.k_min == 0 for site in plan.sites):
        return "every token may run no learner already: only converting more sites lowers what the model costs"
    return "ask for a budget in that range; convert more sites, or allow k = 0 where a residual bypasses, to lower it"


def _in_unit(plan: Plan, share: float, unit: re.Match[str], *, up: bool) -> str:
    """A share of learner MACs as what the whole model costs then, in the unit of a budget; rounded up or down."""
    if unit[2]:
        return f"{_inward(100 * plan.cost.model_share(share), 1, up=up):.1f}%"
    prefix = unit[3] or ""
    cost = plan.cost.macs(share) / plan.model.batch / _PREFIX[prefix]
    return f"{_inward(cost, 3 - math.floor(math.log10(cost)), up=up):.4g} {prefix}MACs"


def _inward(bound: float, digits: int, *, up: bool) -> float:
    """The end of a range with so many decimals, on that side of it where it is still in reach."""
    scaled = bound * 10.0**digits
    return (math.ceil(scaled - TOLERANCE) if up else math.floor(scaled + TOLERANCE)) / 10.0**digits
