"""From facts about a model to decisions: which sites are converted, and the sizes of their ACMs."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from acm_compiler.errors import SelectionError, UsageError, a_few_of, counted, nearest
from acm_compiler.planning.cost import dense_macs_per_token, size_limits
from acm_compiler.planning.decisions import PlannedSite, SecondLayer
from acm_compiler.recipe.schema import GateConfig, SiteRule
from acm_compiler.site import Site

_GATE_STEP = 8
_CLASSES = ("mlp", "attn")
NOT_SELECTED = "not selected"
"""Reason why a site without a rule stays dense."""


def choose_rules(
    found: Sequence[Site], rules: Sequence[SiteRule], *, place: Callable[..., str] | None = None
) -> dict[str, SiteRule]:
    """Choose the rule of each site, by name: the last that matches. Sites without a rule stay dense.

    place: of the rules' values in a recipe, by index and keys of a rule. SelectionError, with the nearest names, when a
    pattern matches no site; UsageError for a rule's key that is for none of its sites.
    """
    chosen: dict[str, SiteRule] = {}
    for i, rule in enumerate(rules):
        selected = _selected(found, rule, place and partial(place, i))
        where = place(i, "match") if place else f"sites, match {', '.join(rule.match)}"
        _refuse_idle(rule, [site for site in found if site.name in selected], where)
        chosen.update(dict.fromkeys(selected, rule))
    return chosen


def too_narrow(found: Sequence[Site], chosen: Mapping[str, SiteRule]) -> dict[str, str]:
    """Projections that stay dense because even learners of width 1 cost more together, by name, each with the reason.

    Those whose rule says a width, or that can be slices, which cost what the projection does, are not among them.
    """
    reasons = {}
    for site in found:
        rule = chosen.get(site.name)
        if rule is None or site.kind != "linear" or site.pair is not None:
            continue
        dense, learners = site.d_in * site.d_out, rule.learners * (site.d_in + site.d_out)
        if rule.width == "auto" and rule.form != "slices" and learners > dense:
            reasons[site.name] = (
                f"too narrow: {rule.learners} learners of width 1 take {learners:,} MACs for a token, and it takes "
                f"{dense:,}; fewer learners, or a width in its rule, make it an ACM all the same"
            )
    return reasons


def plan_sites(found: Sequence[Site], chosen: Mapping[str, SiteRule], gate: GateConfig) -> tuple[PlannedSite, ...]:
    """The sites that have a rule, each with its sizes, in the model's order; UsageError where sizes do not fit."""
    planned = [_plan_site(site, chosen[site.name], gate) for site in found if site.name in chosen]
    known = {site.name: site for site in planned}
    return tuple(_choose_form(site, known, asked=chosen[site.name].form) for site in planned)


def notes_on(planned: Sequence[PlannedSite], chosen: Mapping[str, SiteRule], zeroed: Sequence[str]) -> tuple[str, ...]:
    """Sentences on what `planned` has otherwise than its rules asked for, or the model gives; one for each kind of it.

    zeroed: encoders that leave zeros at padded positions as long as none of their sites is converted.
    """
    notes = []
    if raised := [site.name for site in planned if site.k_min > 0 and chosen[site.name].k_min == 0]:
        why = "its output is not added straight to what goes around it"
        notes.append(f"k_min is 1, not 0 as asked, at {a_few_of(raised, 1)}: {why}; zero: mean allows 0 there")
    within = [name for name in zeroed if any(site.name.startswith(f"{name}.".lstrip(".")) for site in planned)]
    if within:
        names = a_few_of([name or "the model" for name in within], 1)
        notes.append(
            f"padded positions of {names} hold values, as in training, where torch's nested tensors leave zeros in "
            "eval mode: leave them out where tokens are pooled"
        )
    return tuple(notes)


def _selected(found: Sequence[Site], rule: SiteRule, place: Callable[..., str] | None) -> list[str]:
    """The names of the sites that `rule` speaks of, in the model's order."""

    def named(key: str) -> set[str]:
        patterns = enumerate(getattr(rule, key))
        return {name for j, match in patterns for name in select(found, match, where=place and place(key, j))}

    if not rule.match:
        raise UsageError(
            "a rule must name the sites that it is for",
            where=place and place("match"),
            found="match without a name",
            expected="mlp, attn, attn.q, a name or a pattern",
        )
    wanted = named("match")
    if rule.include:
        wanted &= named("include")
    wanted -= named("exclude")
    return [site.name for site in found if site.name in wanted]


def _refuse_idle(rule: SiteRule, selected: Sequence[Site], where: str) -> None:
    """UsageError for a form where no site is a projection, and for a second layer where all are."""
    kinds = {"projections" if site.kind == "linear" else "MLPs" for site in selected}
    for key, kind in (("form", "projections"), ("second_layer", "MLPs")):
        if getattr(rule, key) != "auto" and kinds and kind not in kinds:
            raise UsageError(
                f"{key} is for {kind}, and this rule's sites are none",
                where=where,
                found=_kinds(selected),
                fix=f"leave {key} out of this rule, or write it where {kind} match",
            )


def select(found: Sequence[Site], match: str, *, where: str | None = None) -> list[str]:
    """The names of the sites that `match` means.

    "mlp", "attn", "attn.q" (a role), a site's name, a glob over names, "re:..." or a subtree's name.
    SelectionError, with the pattern's place `where`, when it matches nothing in a model that has sites.
    """
    names = [site.name for site in found if _matches(site, match)]
    if not names and found and match not in _CLASSES:
        known = [site.name for site in found]
        parts = dict.fromkeys(part for name in known for part in _parts(name))
        roles = [f"attn.{role}" for role in dict.fromkeys(site.role for site in found) if role]
        alike = nearest(match, [*_CLASSES, *roles, *known, *parts], least=0.0)
        raise SelectionError(
            f"no site matches {match!r}",
            where=where,
            found=f"{counted(len(known), 'site')}: {_kinds(found)}",
            fix=f"nearest: {', '.join(alike)}",
        )
    return names


def _parts(name: str) -> list[str]:
    """The parts of the model that hold the site, from the outermost on."""
    words = name.split(".")
    return [".".join(words[:i]) for i in range(1, len(words))]


def _matches(site: Site, match: str) -> bool:
    if match == "mlp":
        return site.kind != "linear"
    if match == "attn" or match.startswith("attn."):
        return site.kind == "linear" and match in ("attn", f"attn.{site.role}")
    return matches_name(match, site.name)


def matches_name(pattern: str, name: str) -> bool:
    """True if a name matches a pattern: a glob, the name itself or of what holds it, or "re:" and an expression.

    SelectionError for what follows "re:" and is not a regular expression.
    """
    if pattern.startswith("re:"):
        return _regex(pattern).search(name) is not None
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _regex(match: str) -> re.Pattern[str]:
    try:
        return re.compile(match.removeprefix("re:"))
    except re.error as error:
        fix = "a name, or a glob, is written without re:"
        raise SelectionError(f"{match!r} is not a regular expression", found=str(error), fix=fix) from None


def _kinds(found: Iterable[Site]) -> str:
    sites = list(found)
    counts = {kind: sum(site.kind == kind for site in sites) for kind in ("mlp", "gated_mlp", "linear")}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def _plan_site(site: Site, rule: SiteRule, gate: GateConfig) -> PlannedSite:
    # a nonlinear activation at a linear site has no start that keeps outputs (docs/semantics.md, The start)
    random = rule.init == "random" or (site.kind == "linear" and rule.activation not in ("auto", "identity"))
    planned = PlannedSite(
        **{f.name: getattr(site, f.name) for f in dataclasses.fields(Site)},
        learners=rule.learners,
        width=matched_width(site, rule.learners) if rule.width == "auto" else rule.width,
        k_min=_k_min(site, rule),
        gate_width=0,
        learner_act=_learner_act(site, rule, random),
        second_layer=_second_layer(site, rule),
        form=rule.form,
        lossless=rule.lossless,
        init="random" if random else "auto",
        state="dense" if site.kind == "linear" and not random else "learners",
    )
    _refuse_narrow(planned)
    width = gate_width(planned, gate.share) if gate.hidden == "auto" else gate.hidden
    return _within_limits(dataclasses.replace(planned, gate_width=width))


def _within_limits(site: PlannedSite) -> PlannedSite:
    """`site`; UsageError where its sizes, as asked for, are out of proportion to what it replaces."""
    for key, most in size_limits(site).items():
        if getattr(site, key) > most:
            raise UsageError(
                f"{key} is too large for this site",
                where=site.name,
                found=getattr(site, key),
                expected=f"at most {most}",
            )
    return site


def _refuse_narrow(site: PlannedSite) -> None:
    """UsageError for an MLP that is to start from its weights in learners that cannot hold all its neurons."""
    held = site.learners * site.width
    if site.dense_width is not None and site.init == "auto" and held < site.dense_width:
        raise UsageError(
            "the learners are too narrow to start from this MLP's weights",
            where=site.name,
            found=f"{site.learners} learners x width {site.width} = {held}",
            expected=f"at least {site.dense_width}",
            fix="leave width at auto, or set init: random and fit the learners: acm.calibrate, or a distill phase",
        )


def _choose_form(site: PlannedSite, known: Mapping[str, PlannedSite], *, asked: str) -> PlannedSite:
    """`site` with its pair only where both can be slices. UsageError where slices are asked for and cannot be."""
    if site.kind != "linear" or site.init == "random":
        return dataclasses.replace(site, pair=None, form="svd") if site.kind == "linear" else site
    reason = _unsliceable(site, known)
    if asked == "slices" and reason:
        raise UsageError(
            "this projection cannot be cut into slices", where=site.name, found=reason, fix="set form: auto, or svd"
        )
    if reason:
        return dataclasses.replace(site, pair=None, unpaired=reason)
    if asked == "slices":
        features = site.d_in if site.role == "o" else site.d_out
        return dataclasses.replace(site, form="slices", width=features // site.learners)
    return site


def _unsliceable(site: PlannedSite, known: Mapping[str, PlannedSite]) -> str:
    """Reason why `site` and its partner cannot be slices; empty where they can."""
    if site.pair is None:
        return site.unpaired or "its partner is not known"
    partner, own = known.get(site.pair.partner), (site.learners, site.form, site.lossless, site.init)
    if partner is None:
        return f"its partner {site.pair.partner} stays dense"
    if (partner.learners, partner.form, partner.lossless, partner.init) != own:
        return f"its partner {partner.name} is planned otherwise"
    size = (site.d_in if site.role == "o" else site.d_out) // site.pair.heads
    return f"{size} coordinates of a head do not divide by {site.learners} learners" if size % site.learners else ""


def _second_layer(site: Site, rule: SiteRule) -> SecondLayer:
    if site.kind == "linear" or (rule.second_layer == "auto" and not rule.lossless):
        return "shared"
    return "shared_top" if rule.second_layer == "auto" else rule.second_layer


def matched_width(site: Site, learners: int) -> int:
    """H of one learner such that N of them match the site's MACs and parameters (docs/semantics.md, Sizes)."""
    if site.dense_width is not None:
        return -(-site.dense_width // learners)
    return max(1, round(site.d_in * site.d_out / (learners * (site.d_in + site.d_out))))


def gate_width(site: PlannedSite, share: float) -> int:
    """Hidden width at which the gate costs about `share` of the site's MACs, in steps of 8."""
    ideal = share * dense_macs_per_token(site) / site.d_in
    return max(_GATE_STEP, _GATE_STEP * round(ideal / _GATE_STEP))


def _k_min(site: Site, rule: SiteRule) -> int:
    bypassed = site.residual and not site.residual_norm
    if rule.k_min == "auto":
        return 0 if rule.zero == "mean" or (site.kind != "linear" and bypassed) else 1
    # a rule speaks for many sites; those without a bypass keep their one learner, unless told otherwise
    return rule.k_min if rule.k_min > 0 or bypassed or rule.zero == "mean" else 1


def _learner_act(site: Site, rule: SiteRule, random: bool) -> str:
    if rule.activation == "auto":
        return site.act
    if rule.activation != site.act and not random:
        raise UsageError(
            "learners with another activation than the site's cannot start from its weights",
            where=site.name,
            found=rule.activation,
            expected=site.act,
            fix="leave activation at auto, or set init: random",
        )
    return rule.activation
