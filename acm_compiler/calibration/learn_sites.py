"""Learners for one site, or for two that can change their basis together, in the form that does less damage."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acm_compiler.acm.reference import Weights
from acm_compiler.calibration.damage import Judged, token_damage
from acm_compiler.calibration.fit_learners import as_module, fit_learners, resolve_site
from acm_compiler.calibration.fit_slices import fit_slices
from acm_compiler.calibration.options import Options
from acm_compiler.calibration.prove_slices import TOLERANCE, slices_error
from acm_compiler.calibration.site_record import SiteRecord
from acm_compiler.conversion import sites
from acm_compiler.cost import macs_per_learner
from acm_compiler.measure import Example
from acm_compiler.plans import PlannedSite

_LOG = logging.getLogger(__name__)
# budgets at which two forms are compared, and steps to reach each
_BUDGETS, _HALVINGS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8), 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A resolved site's learners, what they were judged by, and the damage of every k for the sampled tokens."""

    record: SiteRecord
    site: PlannedSite
    weights: Weights
    judged: Judged
    damage_TC: Tensor


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


def learn(
    model: nn.Module, records: Sequence[SiteRecord], examples: Sequence[Example], options: Options, *, elsewhere: float
) -> list[Learned]:
    """The learners of a unit; `elsewhere` is the mean trace of G over sites (see `Judged.of`)."""
    judged = {record.site.name: Judged.of(record, elsewhere=elsewhere) for record in records}
    sliced = _sliced(model, records, judged, examples, options) if len(records) == 2 else None
    if sliced is not None and records[0].site.form == "slices":
        return sliced
    own = []
    for record in records:
        site = resolve_site(record.site, record.tokens)
        weights, known = fit_learners(site, record.dense, record), judged[record.site.name]
        damage_TC = token_damage(weights, known, site.k_min)
        own.append(Learned(record=record, site=site, weights=weights, judged=known, damage_TC=damage_TC))
    return own if sliced is None or gated_damage(own) <= gated_damage(sliced) else sliced


def gated_damage(unit: Sequence[Learned]) -> float:
    """Log damage with the best k for every token at equal budgets, averaged over budgets.

    It is what a gate can make of these learners: it compares forms at equal cost.
    """
    budgets = [budget for budget in _BUDGETS if budget > _least_budget(unit)]
    damages = [_damage_at(unit, budget) for budget in budgets or _BUDGETS[-1:]]
    return sum(math.log(max(damage, 1e-300)) for damage in damages) / len(damages)


def _damage_at(unit: Sequence[Learned], budget: float) -> float:
    """The damage of the cheapest choices that cost `budget`, by bisection of the price of a learner's MACs."""
    macs = [float(macs_per_learner(part.site)) for part in unit]
    full = sum(m * part.site.learners for m, part in zip(macs, unit, strict=True))
    low, high = -80.0, 80.0
    damage = 0.0
    for _ in range(_HALVINGS):
        price = math.exp((low + high) / 2)
        damage = cost = 0.0
        for learner_macs, part in zip(macs, unit, strict=True):
            k_C = torch.arange(part.site.k_min, part.site.learners + 1, device=part.damage_TC.device)
            c_T = (part.damage_TC.double() + k_C * (price * learner_macs / full)).argmin(1)
            damage += float(part.damage_TC.gather(1, c_T[:, None]).double().mean())
            cost += float(k_C[c_T].double().mean()) * learner_macs / full
        low, high = ((low + high) / 2, high) if cost > budget else (low, (low + high) / 2)
    return damage


def _least_budget(unit: Sequence[Learned]) -> float:
    macs = [macs_per_learner(part.site) for part in unit]
    least = sum(m * part.site.k_min for m, part in zip(macs, unit, strict=True))
    return least / sum(m * part.site.learners for m, part in zip(macs, unit, strict=True))


def _sliced(
    model: nn.Module,
    records: Sequence[SiteRecord],
    judged: dict[str, Judged],
    examples: Sequence[Example],
    options: Options,
) -> list[Learned] | None:
    """The pair as slices; None, with a line in the log, where the model's answer shows that it does not hold."""
    found = fit_slices(records[0], records[1], judged)
    like = {name: acm.learners.w_in for name, acm in sites(model).items()}
    modules = {part.site.name: as_module(part.weights, part.site, like[part.site.name]) for part in found}
    error = slices_error(model, modules, examples[0], answer=options.answer)
    if not error <= TOLERANCE[like[found[0].site.name].dtype]:
        names = " and ".join(modules)
        _LOG.info("%s: not sliced, a change of basis moves the model's answer by %.1e", names, error)
        return None
    return [
        Learned(
            record=record,
            site=part.site,
            weights=part.weights,
            judged=part.judged,
            damage_TC=token_damage(part.weights, part.judged, part.site.k_min),
        )
        for record, part in zip(_in_order(records, [part.site.name for part in found]), found, strict=True)
    ]


def _in_order(records: Sequence[SiteRecord], names: Sequence[str]) -> list[SiteRecord]:
    known = {record.site.name: record for record in records}
    return [known[name] for name in names]
