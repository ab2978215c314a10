"""Choose, by trial forwards, which kind of fitted gates a model gets, and the lowest k they may choose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from acm_compiler.acm import Gate
from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import choose_k, utilities
from acm_compiler.calibration.answer import Answer, answers, answers_with, energy, mask_in, run
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.offload import trim
from acm_compiler.planning.cost import learner_macs
from acm_compiler.progress import Progress
from acm_compiler.runtime import ranks
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.runtime.usage import PADDING, recorded
from acm_compiler.sources.inputs import Example

# the budgets compared, as places between the lowest with one learner everywhere and 1
_PLACES = (0.1, 0.3)
# raising costs the budgets below: it must earn so much of the log damage
_WORTH = 0.05
# tokens on which kinds of gates and lowest k are compared; they differ by far more than more tokens would tell
_COMPARED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGate:
    """A gate and its scores of some tokens, [T, C], by which knobs are guessed."""

    gate: Gate
    scores: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Gates and lowest k that serve low budgets best: a kind of gates, by its place among those compared."""

    kind: int = 0
    k_lo: int = 0


@dataclass(slots=True, kw_only=True)
class _Trial:
    """One setting: what it asks of the gates, and what came of it over all batches."""

    knob: float
    k_lo: int
    examples: int = 0
    shares: float = 0.0
    damage: float = 0.0

    def add(self, examples: int, shares: float, damage: float) -> None:
        """Add what came of it over one batch."""
        self.examples, self.shares, self.damage = self.examples + examples, self.shares + shares, self.damage + damage

    @property
    def share(self) -> float:
        """The budget reached."""
        return self.shares / self.examples


def choose_gates(
    found: Rewritten,
    examples: Sequence[Example],
    kinds: Sequence[Mapping[str, ScoredGate]],
    *,
    answer: Answer,
    budgets: Sequence[float] = (),
    progress: Progress,
) -> Choice:
    """The gates and the lowest k with which the model's outputs are nearer to the original's at low budgets.

    kinds: the gates of every site, by its name, in each kind. Budgets in `budgets` stay reachable. All are compared at
    equal shares of learner MACs, on the first of `examples`, in eval mode; gates, mode and choices of the model come
    back.
    """
    plan = found.plan
    floor = plan.cost.least_share(1)
    raised = floor < 1 and all(budget >= floor for budget in budgets) and any(site.k_min == 0 for site in plan.sites)
    if floor >= 1 or not (raised or len(kinds) > 1):
        return Choice()
    targets = [floor + place * (1 - floor) for place in _PLACES]
    trials = {
        Choice(kind=kind, k_lo=k_lo): [_Trial(knob=_guess_knob(found, gates, t, k_lo), k_lo=k_lo) for t in targets]
        for kind, gates in enumerate(kinds)
        for k_lo in ((0, 1) if raised else (0,))
    }
    _try_all(found, examples, kinds, trials, answer, progress)
    if not all(trial.examples for row in trials.values() for trial in row):
        return Choice()  # measuring budgets on these examples says what is wrong with them
    losses = {choice: [_log_damage(row, target) for target in targets] for choice, row in trials.items()}
    of_kinds = [
        sum(min(at) for at in zip(*(row for choice, row in losses.items() if choice.kind == kind), strict=True))
        for kind in range(len(kinds))
    ]
    kind = of_kinds.index(min(of_kinds))
    if not raised:
        return Choice(kind=kind)
    gain = sum(losses[Choice(kind=kind, k_lo=0)]) - sum(losses[Choice(kind=kind, k_lo=1)])
    return Choice(kind=kind, k_lo=1 if gain / len(targets) > _WORTH else 0)


def _try_all(
    found: Rewritten,
    examples: Sequence[Example],
    kinds: Sequence[Mapping[str, ScoredGate]],
    trials: Mapping[Choice, Sequence[_Trial]],
    answer: Answer,
    progress: Progress,
) -> None:
    """Run every trial on as many examples as tell."""
    own, seen = {name: acm.gate for name, acm in found.acms.items()}, 0
    progress.part("token", _COMPARED)
    every = [trial for row in trials.values() for trial in row]
    try:
        with undisturbed(found):
            for tokens, came in ranks.shared(partial(_try, found, kinds, trials, answer), examples):
                for trial, parts in zip(every, came, strict=True):
                    trial.add(*parts)
                seen += tokens
                progress.advance("comparing gates", to=min(seen, _COMPARED))
                if seen >= _COMPARED:
                    break
    finally:
        for name, acm in found.acms.items():
            acm.gate = own[name]


def _try(
    found: Rewritten,
    kinds: Sequence[Mapping[str, ScoredGate]],
    trials: Mapping[Choice, Sequence[_Trial]],
    answer: Answer,
    example: Example,
) -> tuple[int, list[tuple[int, float, float]]]:
    """The real tokens in one batch, at the site that sees most, and what comes of every trial on it."""
    came = []
    mask_BS = mask_in(found.model, example)
    wanted = answers_with(found, {}, example, answer)
    with batch_context(found.model, mask=example[1]):
        for choice, row in trials.items():
            for trial in row:
                for name, acm in found.acms.items():
                    acm.gate = kinds[choice.kind][name].gate
                    acm.set_choices(knob=trial.knob, k_lo=trial.k_lo, k_hi=acm.count)
                with recorded(found) as usage:
                    given = answers(run(found, example[0]), answer, mask_BS)
                damage = energy([g - w for g, w in zip(given, wanted, strict=True)], mask_BS)
                came.append((len(usage.real_shares), float(usage.real_shares.sum()), damage))
                del given  # before the next forward
    trim(hold=True)
    return max((int((k_BS != PADDING).sum()) for k_BS in usage.k.values()), default=0), came


def _log_damage(trials: Sequence[_Trial], share: float) -> float:
    """The log damage at `share`, on the line through two trials."""
    (x0, y0), (x1, y1) = ((trial.share, math.log(max(trial.damage, 1e-300))) for trial in trials)
    return y0 if abs(x1 - x0) < 1e-6 else y0 + (share - x0) / (x1 - x0) * (y1 - y0)


def _guess_knob(found: Rewritten, gates: Mapping[str, ScoredGate], share: float, k_lo: int) -> float:
    """The knob at which the gates would reach `share` on the tokens whose scores are given."""
    low, high = -100.0, 100.0
    for _ in range(30):
        knob = (low + high) / 2
        low, high = (knob, high) if _share_of(found, gates, knob, k_lo) > share else (low, knob)
    return (low + high) / 2


def _share_of(found: Rewritten, gates: Mapping[str, ScoredGate], knob: float, k_lo: int) -> float:
    runs = []
    for name, scored in gates.items():
        acm, site, score_TC = found.acms[name], found.plan.site(name), scored.scores
        there = score_TC.device
        utility_TC = utilities(score_TC, torch.tensor(knob, device=there), acm.choice_costs(there), scored.gate.rule)
        lowest = torch.tensor(max(acm.k_min, min(k_lo, acm.count)), device=there)
        k_T = choose_k(utility_TC, lowest, torch.tensor(acm.count, device=there), acm.k_min)
        runs.append((site, float(to_float64(k_T).mean()) * site.runs, site.runs))
    run, full = learner_macs(runs)
    return run / full
