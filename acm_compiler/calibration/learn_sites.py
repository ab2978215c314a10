"""Learners for one site, or for two that can change their basis together, in every form they may take."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acm_compiler.acm import Gate
from acm_compiler.acm.reference import Weights
from acm_compiler.calibration import ranks
from acm_compiler.calibration.damage import Judged, token_damage
from acm_compiler.calibration.fit_gate import fit_gate
from acm_compiler.calibration.fit_learners import as_module, fit_learners, resolve_site
from acm_compiler.calibration.fit_slices import Fit, fit_slices
from acm_compiler.calibration.options import Options
from acm_compiler.calibration.prove_slices import TOLERANCE, slices_error
from acm_compiler.calibration.site_record import SiteRecord
from acm_compiler.conversion import sites
from acm_compiler.measure import Example
from acm_compiler.plans import PlannedSite

_LOG = logging.getLogger(__name__)
# tokens of each site by which forms are compared
_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A resolved site's learners, what they were judged by, and the damage of every k for the sampled tokens.

    gate: predicts the log of that damage. expected_TC: the damage that it predicts for the first of those tokens.
    tokens: how many the site saw.
    """

    site: PlannedSite
    weights: Weights
    judged: Judged
    damage_TC: Tensor
    gate: Gate
    expected_TC: Tensor
    tokens: int


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
) -> list[list[Learned]]:
    """The learners of a unit in every form it may take; `elsewhere` is the mean trace of G over sites (`Judged.of`)."""
    judged = {record.site.name: Judged.of(record, elsewhere=elsewhere) for record in records}
    sliced = _sliced(model, records, judged, examples, options) if len(records) == 2 else None
    if sliced is not None and records[0].site.form == "slices":
        return [sliced]
    own = []
    for record in records:
        site = resolve_site(record.site, record.tokens)
        weights = fit_learners(site, record.dense, record)
        own.append(_learned(model, record, Fit(site=site, weights=weights, judged=judged[site.name]), options))
    return [own] if sliced is None else [own, sliced]


def _learned(model: nn.Module, record: SiteRecord, fit: Fit, options: Options) -> Learned:
    site, x_TD = fit.site, fit.judged.x_TD
    damage_TC = token_damage(fit.weights, fit.judged, site.k_min)
    like = sites(model)[site.name].learners.w_in
    gate = Gate(site.d_in, site.gate_width, site.columns, device=like.device, dtype=like.dtype)
    fit_gate(gate, x_TD, damage_TC, steps=options.gate_steps, seed=record.seed)
    ranks.from_first([gate])
    with torch.no_grad():
        expected_TC = gate(x_TD[:_TOKENS]).double().exp()
    return Learned(
        site=site,
        weights=fit.weights,
        judged=fit.judged,
        damage_TC=damage_TC,
        gate=gate,
        expected_TC=expected_TC,
        tokens=record.tokens,
    )


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
    known = {record.site.name: record for record in records}
    return [_learned(model, known[part.site.name], part, options) for part in found]
