"""Candidate learners of a site, or of a pair of sites, in every form, and the choice of form for all sites.

One price of a MAC holds for all sites, as one price holds for all gates; a form is judged at the prices of the budgets
that users ask for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import skip_init

from acm_compiler.acm import Gate
from acm_compiler.acm.arguments import Weights
from acm_compiler.calibration.damage import Judged, evened, token_errors
from acm_compiler.calibration.examples import Options
from acm_compiler.calibration.gates import fit_gates
from acm_compiler.calibration.learners.fit_learners import fit_learners, resolve_site
from acm_compiler.calibration.learners.local_training import can_be_trained, train_locally
from acm_compiler.calibration.learners.slices import Fit
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.passes.rewrite.offload import kept
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.runtime import ranks

# tokens of each site by which forms are compared
_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A resolved site's learners, and the damage of every k for the sampled tokens `x_TD`.

    evened_TC: the same with weights of tokens that are evened out. tokens: how many the site saw.
    """

    site: PlannedSite
    weights: Weights
    x_TD: Tensor
    damage_TC: Tensor
    evened_TC: Tensor
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned(Candidate):
    """A candidate with the gate that predicts the log of its damage, and one that predicts the evened one's.

    expected_TC: the damage that the first predicts for the first of the sampled tokens, float64.
    """

    gate: Gate
    evened_gate: Gate
    expected_TC: np.ndarray


Unit = list[Learned]


def units(planned: Sequence[PlannedSite]) -> Iterator[list[PlannedSite]]:
    """The sites alone or, where they may be slices, in pairs; in the order of the first of each."""
    known = {site.name: site for site in planned}
    done: set[str] = set()
    for site in planned:
        if site.name in done:
            continue
        partner = known.get(site.pair.partner) if site.pair is not None and site.form in ("auto", "slices") else None
        unit = [site] if partner is None else [site, partner]
        done.update(part.name for part in unit)
        yield unit


def sharing(groups: Iterable[Sequence[PlannedSite]], inputs: Mapping[str, Tensor]) -> list[list[Sequence[PlannedSite]]]:
    """Neighbouring units of sites with those that share an input with the one before."""
    together: list[list[Sequence[PlannedSite]]] = []
    read: set[int] = set()
    for unit in groups:
        own = {id(inputs[site.name]) for site in unit}
        if own & read:
            together[-1].append(unit)
        else:
            together.append([unit])
        read = own
    return together


def learn(
    records: Sequence[SiteRecord], judged: Mapping[str, Judged], slices: Mapping[str, Fit], options: Options
) -> list[list[Candidate]]:
    """The learners of a unit in every form it may take; `slices` holds those of the pairs that can be sliced."""
    learned = [
        [kept(_judge(fit, record.tokens)) for fit in _forms(record, judged, slices, options)] for record in records
    ]
    return [list(unit) for unit in zip(*learned, strict=True)]


def _forms(record: SiteRecord, judged: Mapping[str, Judged], slices: Mapping[str, Fit], options: Options) -> list[Fit]:
    """The site's learners in every form that it may take."""
    name = record.site.name
    if name in slices and record.site.form == "slices":
        return [slices[name]]
    site = resolve_site(record.site, record.tokens)
    weights, dense = fit_learners(site, record.dense, record)
    own = Fit(site=site, weights=weights, judged=replace(judged[name], dense=dense))
    if record.shown is not None and can_be_trained(weights, dense):
        shown_TD, steps = record.shown.vectors, options.local_steps
        own = replace(own, weights=train_locally(weights, own.judged, shown_TD, steps=steps, seed=options.seed))
    return [own, slices[name]] if name in slices else [own]


def _judge(fit: Fit, tokens: int) -> Candidate:
    judged = fit.judged
    error_TC = token_errors(fit.weights, judged, fit.site.k_min)
    return Candidate(
        site=fit.site,
        weights=fit.weights,
        x_TD=judged.x_TD,
        damage_TC=error_TC * judged.listens_T[:, None],
        evened_TC=error_TC * evened(judged.listens_T)[:, None],
        tokens=tokens,
    )


def with_gates(
    candidates: Sequence[Sequence[Sequence[Candidate]]],
    options: Options,
    *,
    like: Mapping[str, Tensor],
) -> list[list[Unit]]:
    """The candidates of each unit with their gates, which are trained together where they read the same input.

    like: by site, a tensor of the type and device that its gate will have.
    """
    every = [part for forms in candidates for unit in forms for part in unit]
    gates = {id(part): [_new_gate(part.site, like[part.site.name]) for _ in range(2)] for part in every}
    readers = defaultdict[int, list[Candidate]](list)
    for part in every:
        readers[id(part.x_TD)].append(part)
    for parts in readers.values():
        students = [gate for part in parts for gate in gates[id(part)]]
        targets = [damage_TC for part in parts for damage_TC in (part.damage_TC, part.evened_TC)]
        fit_gates(students, parts[0].x_TD, targets, steps=options.gate_steps, seed=options.seed)
    ranks.from_first([gate for both in gates.values() for gate in both])
    return [[[_learned(part, *gates[id(part)]) for part in unit] for unit in forms] for forms in candidates]


def _new_gate(site: PlannedSite, like: Tensor) -> Gate:
    # drawn weights would be of no use here, and cost the user's generator
    return skip_init(Gate, site.d_in, site.gate_width, site.columns, device=like.device, dtype=like.dtype)


@torch.no_grad()
def _learned(part: Candidate, gate: Gate, evened_gate: Gate) -> Learned:
    known = {field.name: getattr(part, field.name) for field in fields(Candidate)}
    expected_TC = np.exp(gate(part.x_TD[:_TOKENS]).float().cpu().numpy().astype(np.float64))
    return Learned(**known, gate=gate, evened_gate=evened_gate, expected_TC=expected_TC)


# budgets that forms are judged at; halvings of the logarithm of a price; how often prices and forms follow each other
_BUDGETS, _HALVINGS, _ROUNDS = (0.35, 0.45, 0.6, 0.75), 24, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A site of a unit as forms are compared: damage of its k, as it is expected and as it is, float64 [T, C], the k
    of the choices [C], MACs of a learner, and how many tokens the site saw.
    """

    expected_TC: np.ndarray
    damage_TC: np.ndarray
    k_C: np.ndarray
    learner: int
    tokens: int

    @staticmethod
    def of(part: Learned) -> _Part:
        site = part.site
        return _Part(
            expected_TC=part.expected_TC,
            damage_TC=part.damage_TC[: len(part.expected_TC)].cpu().numpy().astype(np.float64),
            k_C=np.arange(site.k_min, site.learners + 1),
            learner=macs_per_learner(site),
            tokens=part.tokens,
        )

    def macs(self, k: float) -> float:
        """MACs of all tokens that run `k` learners each on average."""
        return self.tokens * self.learner * k

    def run(self, price: float) -> tuple[float, float]:
        """Damage and MACs where every token runs the k that its gate chooses at this price of a MAC."""
        c_T = (self.expected_TC + self.k_C * (price * self.learner)).argmin(1)
        damage = self.tokens * float(self.damage_TC[np.arange(len(c_T)), c_T].mean())
        return damage, self.macs(float(self.k_C[c_T].mean()))


@dataclass(frozen=True, slots=True)
class _Form:
    """A unit in one of its forms, and what its sites cost."""

    unit: Unit
    parts: list[_Part]

    def run(self, price: float) -> tuple[float, float]:
        """Damage and MACs of the unit at this price of a MAC."""
        damage = macs = 0.0
        for part in self.parts:
            own_damage, own_macs = part.run(price)
            damage, macs = damage + own_damage, macs + own_macs
        return damage, macs


def choose_forms(candidates: Sequence[Sequence[Unit]]) -> list[Unit]:
    """One of the `candidates` of each unit of sites.

    It lowers log damage, averaged over budgets, most: damage plus price times MACs of what the gates choose, over the
    damage of the whole at that price. (The best k of every token, which no gate knows, would favour forms that harm a
    few tokens much.)
    """
    if all(len(offered) == 1 for offered in candidates):
        return [offered[0] for offered in candidates]
    forms = [[_Form(unit, [_Part.of(part) for part in unit]) for unit in offered] for offered in candidates]
    chosen = [offered[0] for offered in forms]
    parts = [part for form in chosen for part in form.parts]
    least = sum(part.macs(int(part.k_C[0])) for part in parts) / _full(chosen)
    budgets = [budget for budget in _BUDGETS if budget > least] or _BUDGETS[-1:]
    for _ in range(_ROUNDS):
        prices = [_price(chosen, budget) for budget in budgets]
        wholes = [max(sum(form.run(price)[0] for form in chosen), 1e-300) for price in prices]
        paid = partial(_paid, prices=prices, wholes=wholes)
        chosen = [min(offered, key=paid) for offered in forms]
    return [form.unit for form in chosen]


def _paid(form: _Form, *, prices: Sequence[float], wholes: Sequence[float]) -> float:
    """Damage plus price times MACs, each over the damage of the `wholes` at that price, summed over prices."""
    runs = [form.run(price) for price in prices]
    return sum((damage + p * macs) / whole for p, whole, (damage, macs) in zip(prices, wholes, runs, strict=True))


def _price(forms: Sequence[_Form], budget: float) -> float:
    """The price of a MAC at which all units together spend `budget` of their MACs."""
    low, high = -100.0, 100.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        share = sum(form.run(math.exp(middle))[1] for form in forms) / _full(forms)
        low, high = (middle, high) if share > budget else (low, middle)
    return math.exp((low + high) / 2)


def _full(forms: Sequence[_Form]) -> float:
    """MACs of all units with all learners."""
    return sum(part.macs(int(part.k_C[-1])) for form in forms for part in form.parts)
