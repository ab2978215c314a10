"""Learners for one site, or for two that can change their basis together, in every form they may take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from acm_compiler.acm import Gate
from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import Weights
from acm_compiler.calibration import ranks
from acm_compiler.calibration.damage import Judged, token_damage
from acm_compiler.calibration.fit_learners import fit_learners, resolve_site
from acm_compiler.calibration.gates import fit_gates
from acm_compiler.calibration.options import Options
from acm_compiler.calibration.prove_slices import proven
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.calibration.slices import Fit, fit_slices
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.planning.plan import PlannedSite
from acm_compiler.runtime.measure_budgets import Example

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


def fit_pairs(
    model: nn.Module,
    pairs: Sequence[Sequence[SiteRecord]],
    judged: Mapping[str, Judged],
    examples: Sequence[Example],
    options: Options,
) -> dict[str, Fit]:
    """Slices for the sites of these pairs, by name, without the pairs whose change of basis the model refutes."""
    fits = [fit_slices(first, second, judged) for first, second in pairs]
    hold = proven(model, fits, examples[0], answer=options.answer) if fits else []
    return {part.site.name: part for fit, holds in zip(fits, hold, strict=True) if holds for part in fit}


def learn(
    model: nn.Module,
    records: Sequence[SiteRecord],
    judged: Mapping[str, Judged],
    slices: Mapping[str, Fit],
    options: Options,
) -> list[list[Learned]]:
    """The learners of a unit in every form it may take; `slices` holds those of the pairs that can be sliced."""
    learned = [_learned(model, record, _forms(record, judged, slices), options) for record in records]
    return [list(unit) for unit in zip(*learned, strict=True)]


def _forms(record: SiteRecord, judged: Mapping[str, Judged], slices: Mapping[str, Fit]) -> list[Fit]:
    """The site's learners in every form that it may take."""
    name = record.site.name
    if name in slices and record.site.form == "slices":
        return [slices[name]]
    site = resolve_site(record.site, record.tokens)
    own = Fit(site=site, weights=fit_learners(site, record.dense, record), judged=judged[name])
    return [own, slices[name]] if name in slices else [own]


def _learned(model: nn.Module, record: SiteRecord, fits: Sequence[Fit], options: Options) -> list[Learned]:
    damages = [token_damage(fit.weights, fit.judged, fit.site.k_min) for fit in fits]
    like = sites(model)[record.site.name].learners.w_in
    # drawn weights would be of no use here, and cost the user's generator
    gates = [
        skip_init(Gate, fit.site.d_in, fit.site.gate_width, fit.site.columns, device=like.device, dtype=like.dtype)
        for fit in fits
    ]
    inputs = {id(fit.judged.x_TD): fit.judged.x_TD for fit in fits}
    for x_TD in inputs.values():
        same = [place for place, fit in enumerate(fits) if fit.judged.x_TD is x_TD]
        targets = [damages[place] for place in same]
        fit_gates([gates[place] for place in same], x_TD, targets, steps=options.gate_steps, seed=record.seed)
    ranks.from_first(gates)
    return [_of_fit(*parts, record.tokens) for parts in zip(fits, damages, gates, strict=True)]


@torch.no_grad()
def _of_fit(fit: Fit, damage_TC: Tensor, gate: Gate, tokens: int) -> Learned:
    return Learned(
        site=fit.site,
        weights=fit.weights,
        judged=fit.judged,
        damage_TC=damage_TC,
        gate=gate,
        expected_TC=to_float64(gate(fit.judged.x_TD[:_TOKENS])).exp(),
        tokens=tokens,
    )
