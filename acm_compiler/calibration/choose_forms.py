"""Which form of its learners every site takes: the one with which the model as a whole is damaged least.

One price of a MAC holds for all sites, as one knob does for all gates. A form that is better at few learners and one
that is better at many are compared by what they do at the prices of the budgets that users ask for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from acm_compiler.acm.precision import to_float64
from acm_compiler.calibration.candidates import Learned
from acm_compiler.planning.cost import macs_per_learner

Unit = list[Learned]

_BUDGETS, _HALVINGS, _ROUNDS = (0.35, 0.45, 0.6, 0.75), 24, 2


def choose_forms(candidates: Sequence[Sequence[Unit]]) -> list[Unit]:
    """One of the `candidates` of each unit of sites.

    It lowers log damage, averaged over budgets, most: damage plus price times MACs of what the gates choose, over the
    damage of the whole at that price. (The best k of every token, which no gate knows, would favour forms that harm a
    few tokens much.)
    """
    chosen = [options[0] for options in candidates]
    if all(len(options) == 1 for options in candidates):
        return chosen
    least = _share(chosen, math.inf)
    budgets = [budget for budget in _BUDGETS if budget > least] or _BUDGETS[-1:]
    for _ in range(_ROUNDS):
        prices = [_price(chosen, budget) for budget in budgets]
        wholes = [max(sum(_run(unit, price)[0] for unit in chosen), 1e-300) for price in prices]
        chosen = [
            min(options, key=lambda unit: sum(_paid(unit, p) / w for p, w in zip(prices, wholes, strict=True)))
            for options in candidates
        ]
    return chosen


def _paid(unit: Unit, price: float) -> float:
    damage, macs = _run(unit, price)
    return damage + price * macs


def _price(units: Sequence[Unit], budget: float) -> float:
    """The price of a MAC at which all units together spend `budget` of their MACs."""
    low, high = -100.0, 100.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _share(units, math.exp(middle)) > budget else (low, middle)
    return math.exp((low + high) / 2)


def _share(units: Sequence[Unit], price: float) -> float:
    """The share of their MACs that all units together spend at this price; at an infinite one, all k_min."""
    parts = [part for unit in units for part in unit]
    full = sum(part.tokens * macs_per_learner(part.site) * part.site.learners for part in parts)
    if math.isinf(price):
        return sum(part.tokens * macs_per_learner(part.site) * part.site.k_min for part in parts) / full
    return sum(_run(unit, price)[1] for unit in units) / full


def _run(unit: Unit, price: float) -> tuple[float, float]:
    """Damage and MACs of a unit where every token runs the k that its gate chooses at this price of a MAC."""
    damage = macs = 0.0
    for part in unit:
        expected_TC, learner = part.expected_TC, macs_per_learner(part.site)
        k_C = torch.arange(part.site.k_min, part.site.learners + 1, device=expected_TC.device)
        c_T = (expected_TC + k_C * (price * learner)).argmin(1)
        damage += part.tokens * float(to_float64(part.damage_TC[: len(c_T)]).gather(1, c_T[:, None]).mean())
        macs += part.tokens * learner * float(to_float64(k_C[c_T]).mean())
    return damage, macs
