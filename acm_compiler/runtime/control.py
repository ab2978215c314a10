"""Choosing at run time how much a rewritten model computes: a fixed k, a budget, or relaxed training.

Every call writes the same few tensors of each ACM in place, so a compiled model follows without recompiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import overload

from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.acm.intact import refuse_empty, refuse_quantized
from acm_compiler.acm.module import Phase
from acm_compiler.errors import LayoutUnknown, NoBudgetTable, UsageError, require_fitted
from acm_compiler.passes.rewrite.conversion import Conversion, Rewritten, rewritten, wholly_rewritten
from acm_compiler.planning.call_times import AskedTime, CallTimes, asked_time, device_name
from acm_compiler.planning.cost import learner_macs
from acm_compiler.runtime.budgets import TOLERANCE, Setting, is_number, parse_budget, setting_of, share_within
from acm_compiler.runtime.masks import unwatch_padding, watch_padding

PHASES: tuple[Phase, Phase] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class FixedK:
    """Every token runs `k` learners, or as near to it as a site's own bounds allow."""

    k: int


@dataclass(frozen=True, slots=True)
class Gated:
    """The gates decide, by this knob, within these bounds."""

    knob: float
    k_lo: int
    k_hi: int


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Training samples the gates at this temperature; eval() is deterministic all the same."""

    temperature: float


def run_mode(acm: ACM) -> FixedK | Gated | Relaxed:
    """The run mode of `acm` now, read from its tensors."""
    if acm.temperature is not None:
        return Relaxed(acm.temperature)
    k_lo, k_hi = int(acm.k_lo), int(acm.k_hi)
    return FixedK(k_lo) if k_lo == k_hi else Gated(acm.knob_value, k_lo, k_hi)


def set_k(model: nn.Module, k: int | None) -> None:
    """Let every token run `k` learners; None hands the choice back to the gates, at the last budget set.

    A site whose k_min is above `k` runs its k_min, one with fewer learners all of them. `model` may be a part of a
    rewritten model: then only the sites in it change. UsageError outside [0, largest N]; SitesNotFitted while sites
    without fitted learners exist and `k` is below N; FixedBudget as `set_budget`.
    """
    found = rewritten(model)
    refuse_empty(found.acms)
    if k is None:
        _hand_to_gates(found)
        return
    most = max(acm.count for acm in found.acms.values())
    if isinstance(k, bool) or not isinstance(k, Integral):
        raise UsageError("k must be one whole number, for all sites", found=repr(k), expected=f"0 to {most}, or None")
    if not 0 <= k <= most:
        raise UsageError("no site has that many learners", found=k, expected=f"a whole number from 0 to {most}")
    if k < most:
        refuse_unfitted(found, f"set_k({k})")
    for acm in found.acms.values():
        acm.set_choices(knob=acm.knob_value, k_lo=int(k), k_hi=int(k))


def _hand_to_gates(found: Rewritten) -> None:
    owner = found.owner
    if isinstance(owner.budget, dict):
        for phase in PHASES:
            _write_setting(found, setting_of(owner, owner.budget[phase]), owner.cap, phase)
        return
    if owner.budget is not None:
        _write_setting(found, setting_of(owner, owner.budget), owner.cap)
        return
    for acm in found.acms.values():
        lowest = acm.count if acm.state == "dense" else acm.k_min
        acm.set_choices(knob=acm.knob_value, k_lo=lowest, k_hi=acm.count)


@overload
def set_budget(model: nn.Module, budget: float | str | None, *, cap: float | None = None) -> float: ...


@overload
def set_budget(
    model: nn.Module, budget: Mapping[str, float | str], *, cap: float | None = None
) -> dict[str, float]: ...


def set_budget(
    model: nn.Module, budget: float | str | Mapping[str, float | str] | None, *, cap: float | None = None
) -> float | dict[str, float]:
    """Let the gates spend `budget` and return the share of learner MACs that the table expects of it.

    That is less than was asked where no setting reaches it, as on data whose tokens are all alike; under a `cap`, which
    the table does not know, it is the most that can be.

    budget: a share of learner MACs (0.4), "60%" of the dense model's MACs, "11 GMACs", or None for the recipe's own;
    "9 ms", or "9 ms at 8" for a batch of 8: the largest budget that `acmc bench` measured within that time, at the
    batch size measured nearest to it (unless said, 1), of a model loaded from the folder that holds `bench.json`;
    or one per phase of a decoder, {"prefill": 0.8, "decode": 0.4}: decode is a call with one token per sequence, all
    else is prefill; then the shares come back by phase. cap: an upper bound on every token's k, as a share of N.
    The choice holds for the whole model until changed. Raises BudgetUnreachable (with the range), NoBudgetTable when
    no phase has measured the gates, SitesNotFitted, LayoutUnknown where the phases cannot be told apart, FixedBudget
    for exported graphs and for models frozen for good, UsageError for a part of a rewritten model.
    """
    found = wholly_rewritten(model, "a budget")
    refuse_empty(found.acms)
    owner = found.owner
    if cap is not None and not (is_number(cap) and 0 < cap <= 1):
        raise UsageError("cap must be a share of N in (0, 1]", found=repr(cap))
    wanted = owner.default_budget if budget is None else budget
    if wanted is None:
        raise _no_own_budget(owner)
    if (time := asked_time(wanted)) is not None:
        wanted = _times_of(found, time).budget_within(time)
    if not isinstance(wanted, Mapping):
        _refuse_dense(found, wanted, cap)
        return min(spend(found, wanted, cap), _largest_share(found))
    for phase in _check_phases(found, wanted):
        _refuse_dense(found, wanted[phase], cap)
    phases = {phase: _setting(found, wanted[phase]) for phase in PHASES}
    for phase, (setting, _) in phases.items():
        _write_setting(found, setting, cap, phase)
    owner.budget, owner.cap = {phase: share for phase, (_, share) in phases.items()}, cap
    most = _largest_share(found)
    return {phase: min(setting.share, most) for phase, (setting, _) in phases.items()}


def _times_of(found: Rewritten, asked: AskedTime) -> CallTimes:
    """The times that were measured of this model. NoBudgetTable without any, UsageError for another device's."""
    times, here = found.owner.times, next(iter(found.acms.values())).knob.device
    if times is None or not times.calls:
        raise NoBudgetTable(
            "no times of this model have been measured, so no budget belongs to this one",
            found=str(asked),
            fix="acmc bench DIR measures the model saved in DIR; then acm.load(DIR); or name a share, such as 0.6",
        )
    if times.device != device_name(here):
        raise UsageError(
            "the times of this model were measured on another device",
            found=times.device,
            expected=device_name(here),
            fix="measure here: acmc bench DIR; then acm.load(DIR)",
        )
    return times


def spend(found: Rewritten, wanted: float | str, cap: float | None = None) -> float:
    """Set one budget for all phases of a model whose ACMs are known and have learners; gives the share expected."""
    setting, share = _setting(found, wanted)
    _write_setting(found, setting, cap)
    found.owner.budget, found.owner.cap = share, cap
    return setting.share


def _refuse_dense(found: Rewritten, wanted: float | str, cap: float | None) -> None:
    """SitesNotFitted where a budget asks for less than all that sites without learners run."""
    if parse_budget(wanted, found.plan) < 1 - TOLERANCE or cap is not None:
        refuse_unfitted(found, f"set_budget({wanted!r})")


def _setting(found: Rewritten, wanted: float | str) -> tuple[Setting, float]:
    """The setting of the gates for the budget `wanted`, and the share of learner MACs that it asks for."""
    setting, share = setting_of(found.owner, wanted), share_within(wanted, found.plan, low=found.owner.table_min)
    assert share is not None
    return setting, share


def _write_setting(found: Rewritten, setting: Setting, cap: float | None, phase: Phase | None = None) -> None:
    for acm in found.acms.values():
        acm.set_choices(knob=setting.knob, k_lo=setting.k_lo, k_hi=highest_k(acm.count, cap), phase=phase)


def highest_k(count: int, cap: float | None) -> int:
    """The most of `count` learners that `cap`, a share of N, lets a token run; without one all of them."""
    return count if cap is None else int(cap * count + TOLERANCE)


def is_held(acm: ACM, owner: Conversion) -> bool:
    """True if every token runs the same k at this site and no budget asks for that."""
    k_lo, k_hi = int(acm.k_lo), int(acm.k_hi)
    if k_lo < k_hi or acm.state == "dense":
        return False
    budget = owner.budget["prefill"] if isinstance(owner.budget, dict) else owner.budget
    return budget is None or (k_lo, k_hi) != acm.within(setting_of(owner, budget).k_lo, highest_k(acm.count, owner.cap))


def _largest_share(found: Rewritten) -> float:
    """The share of learner MACs when every token runs as many learners as it may."""
    k_hi = {name: int(acm.k_hi) for name, acm in found.acms.items()}
    most, full = learner_macs((site, site.runs * k_hi[site.name], site.runs) for site in found.plan.sites)
    return most / full


def _check_phases(found: Rewritten, wanted: Mapping[str, float | str]) -> tuple[Phase, ...]:
    """Both phases. UsageError for other names, LayoutUnknown where a site cannot tell them apart."""
    if set(wanted) != set(PHASES):
        raise UsageError("budgets per phase must name both phases", found=", ".join(wanted), expected=", ".join(PHASES))
    if times := [budget for budget in wanted.values() if asked_time(budget)]:
        raise UsageError(
            "times must be of whole calls, not of a phase", found=repr(times[0]), expected="shares, such as 0.6"
        )
    refuse_phases(found)
    return PHASES


def refuse_phases(found: Rewritten) -> None:
    """LayoutUnknown where a site cannot tell the phases apart."""
    for name, acm in found.acms.items():
        if acm.axis_of_ones is None:
            raise LayoutUnknown(
                "how many tokens of each sequence a call holds is not known at this site",
                where=name,
                fix="ask for the same in both phases, or exclude the site",
            )


def _no_own_budget(owner: Conversion) -> NoBudgetTable:
    example = "acm.set_budget(model, 0.6)"
    return NoBudgetTable(
        "this model has no default budget",
        expected=f"a budget from {owner.table_min:.3f} to 1" if owner.table else None,
        fix=f"name a budget: {example}"
        if owner.table
        else f"first acm.calibrate(model, batches), or a recipe's gate phase; then name a budget: {example}",
    )


def relax(model: nn.Module, temperature: float | None) -> None:
    """From now on train() samples the gates (Gumbel, straight through), like dropout; eval() stays deterministic.

    None ends it. `acm.losses` then leaves out what the calls' own padding masks say, as `acm.record` does. Sampling
    goes over all of a site's choices, at the knob set last. An optimizer for it is made after `rewrite` and
    `calibrate`, both of which make new parameters. SitesNotFitted while sites without fitted learners exist.
    """
    if temperature is not None and not (is_number(temperature) and 0 < temperature < math.inf):
        raise UsageError("a temperature must be positive", found=repr(temperature), expected="a number such as 0.8")
    found = rewritten(model)
    if temperature is not None:
        refuse_unfitted(found, "relax")
        refuse_quantized(found.acms, "relax")
    unwatch_padding(model)
    found.owner.padding = None if temperature is None else watch_padding(model)
    for acm in found.acms.values():
        acm.temperature = temperature
        acm.choices.clear()


def refuse_unfitted(found: Rewritten, request: str) -> None:
    """`require_fitted` of the sites of a live model."""
    require_fitted([name for name, acm in found.acms.items() if acm.state == "dense"], request)
