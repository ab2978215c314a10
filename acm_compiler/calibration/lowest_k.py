"""The lowest k of a budget table, by the model's own answers at low budgets (docs/semantics.md, Gates)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import choose_k, utilities
from acm_compiler.calibration import ranks
from acm_compiler.calibration.examples import mask_in
from acm_compiler.calibration.observe import tapped
from acm_compiler.calibration.outputs import Answer, answers, energy
from acm_compiler.inputs import call_model
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.measure_budgets import Example, undisturbed
from acm_compiler.runtime.usage import record

# the budgets compared, as places between the lowest with one learner everywhere and 1
_PLACES = (0.08, 0.2)
# raising costs the budgets below: it must earn so much of the log damage
_WORTH = 0.05


@dataclass(slots=True, kw_only=True)
class _Trial:
    """One setting: what it asks of the gates, and what came of it over all batches."""

    knob: float
    k_lo: int
    examples: int = 0
    shares: float = 0.0
    damage: float = 0.0

    def join(self) -> None:
        """Become what came of it on all processes."""
        parts = ranks.gathered((self.examples, self.shares, self.damage))
        self.examples, self.shares, self.damage = (sum(values) for values in zip(*parts, strict=True))

    @property
    def share(self) -> float:
        """The budget reached."""
        return self.shares / self.examples


def choose_lowest_k(
    model: nn.Module,
    examples: Sequence[Example],
    scores: Mapping[str, Tensor],
    *,
    answer: Answer,
    budgets: Sequence[float] = (),
) -> int:
    """0, or 1 where one learner for every token brings the model's answers nearer to the original's at low budgets.

    scores: the gates' scores [T, C] of some tokens of every site, to guess knobs by. Budgets in `budgets` stay
    reachable. The two are compared at equal shares of learner MACs, on `examples`.
    """
    plan = conversion(model).plan
    if all(site.k_min > 0 for site in plan.sites):
        return 0
    floor = plan.cost.least_share(1)
    if floor >= 1 or any(budget < floor for budget in budgets):
        return 0
    targets = [floor + place * (1 - floor) for place in _PLACES]
    trials = {k_lo: [_Trial(knob=_guess_knob(model, scores, t, k_lo), k_lo=k_lo) for t in targets] for k_lo in (0, 1)}
    with undisturbed(model):
        for example in examples:
            _run(model, example, [trial for row in trials.values() for trial in row], answer)
    for row in trials.values():
        for trial in row:
            trial.join()
    if not trials[0][0].examples:
        return 0  # measuring budgets on these examples says what is wrong with them
    gains = [_log_damage(trials[0], t) - _log_damage(trials[1], t) for t in targets]
    return 1 if sum(gains) / len(gains) > _WORTH else 0


def _run(model: nn.Module, example: Example, trials: Sequence[_Trial], answer: Answer) -> None:
    """Add what every trial does to one batch."""
    mask_BS = mask_in(model, example)
    with batch_context(model, mask=example[1]):
        with tapped(model, {}):
            wanted = answers(call_model(model, example[0]), answer, mask_BS)
        for trial in trials:
            for acm in sites(model).values():
                acm.set_choices(knob=trial.knob, k_lo=trial.k_lo, k_hi=acm.count)
            with record(model, macs=False) as usage:
                found = answers(call_model(model, example[0]), answer, mask_BS)
            trial.examples += len(usage.real_shares)
            trial.shares += float(usage.real_shares.sum())
            trial.damage += energy([f - w for f, w in zip(found, wanted, strict=True)], mask_BS)


def _log_damage(trials: Sequence[_Trial], share: float) -> float:
    """The log damage at `share`, on the line through two trials."""
    (x0, y0), (x1, y1) = ((trial.share, math.log(max(trial.damage, 1e-300))) for trial in trials)
    return y0 if abs(x1 - x0) < 1e-6 else y0 + (share - x0) / (x1 - x0) * (y1 - y0)


def _guess_knob(model: nn.Module, scores: Mapping[str, Tensor], share: float, k_lo: int) -> float:
    """The knob at which the gates would reach `share` on the tokens whose scores are given."""
    low, high = -100.0, 100.0
    for _ in range(30):
        knob = (low + high) / 2
        low, high = (knob, high) if _share_of(model, scores, knob, k_lo) > share else (low, knob)
    return (low + high) / 2


def _share_of(model: nn.Module, scores: Mapping[str, Tensor], knob: float, k_lo: int) -> float:
    plan, acms = conversion(model).plan, sites(model)
    run = full = 0.0
    for name, score_TC in scores.items():
        acm, site = acms[name], plan.site(name)
        there = score_TC.device
        utility_TC = utilities(score_TC, torch.tensor(knob, device=there), acm.choice_costs(there), acm.gate.rule)
        lowest = torch.tensor(max(acm.k_min, min(k_lo, acm.count)), device=there)
        k_T = choose_k(utility_TC, lowest, torch.tensor(acm.count, device=there), acm.k_min)
        weight = macs_per_learner(site) * site.tokens * site.calls
        run += float(to_float64(k_T).mean()) * weight
        full += acm.count * weight
    return run / full
