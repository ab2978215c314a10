"""Projections of one attention that read the same tokens, planned as one site."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from acm_compiler.errors import UsageError
from acm_compiler.recipe.schema import SiteRule
from acm_compiler.site import Graft, Pair, Site

_ROLES = ("q", "k", "v")
_NEEDS = "q, k and v that are modules of their own, read the same tokens, and follow one rule"


def pack_sites(
    found: Sequence[Site], reads: Mapping[str, str], chosen: Mapping[str, SiteRule]
) -> tuple[tuple[Site, ...], dict[str, SiteRule]]:
    """The sites, q, k and v of an attention as one where their rule says `pack`, and the rule of each by its name.

    reads: by name of a site, the value that it reads. The packed site is named after the first of the three, and its
    learners give their outputs side by side. UsageError for a rule that finds none to pack.
    """
    groups = _groups(found, reads, chosen)
    _refuse_idle(chosen, groups)
    packed = {group[0].name: _packed(group) for group in groups}
    parts = {site.name for group in groups for site in group}
    partners = {site.pair.partner: name for name, site in packed.items() if site.pair}
    others = {
        site.name: _with_partner(site, partners.get(site.name), parts) for site in found if site.name not in parts
    }
    sites = packed | others
    return (
        tuple(sites[site.name] for site in found if site.name in sites),
        {name: rule for name, rule in chosen.items() if name in sites},
    )


def _groups(found: Sequence[Site], reads: Mapping[str, str], chosen: Mapping[str, SiteRule]) -> list[list[Site]]:
    """The sites q, k and v of each attention that can become one, in the order of execution."""
    groups: dict[tuple[str, int], list[Site]] = defaultdict(list)
    for site in found:
        rule = chosen.get(site.name)
        alone = site.graft.kind == "W" and len(site.graft.modules) == 1
        if rule is not None and rule.pack and site.role in _ROLES and alone and site.name in reads:
            groups[reads[site.name], id(rule)].append(site)
    return [group for group in groups.values() if sorted(str(site.role) for site in group) == sorted(_ROLES)]


def _refuse_idle(chosen: Mapping[str, SiteRule], groups: Sequence[Sequence[Site]]) -> None:
    """UsageError for a rule that says `pack` where nothing can be packed."""
    packing = {id(chosen[group[0].name]) for group in groups}
    for name, rule in chosen.items():
        if rule.pack and id(rule) not in packing:
            where = f"sites, match {', '.join(rule.match)}"
            raise UsageError("there is nothing to pack", where=where, found=name, expected=_NEEDS, fix="leave pack out")


def _packed(group: Sequence[Site]) -> Site:
    """One site for these projections, in the order of execution."""
    widths, pair = tuple(site.d_out for site in group), _pair(group)
    alone = next((site.unpaired for site in group if site.pair is None), "its heads have no order among them")
    return dataclasses.replace(
        group[0],
        role="qkv",
        d_out=sum(widths),
        first=tuple(ref for site in group for ref in site.first),
        graft=Graft(kind="P", modules=tuple(site.name for site in group), widths=widths),
        pair=pair,
        unpaired="" if pair else alone,
    )


def _pair(group: Sequence[Site]) -> Pair | None:
    """The pair of the packed site with the projection that the values are for; None where a part has none."""
    by_role = {site.role: site for site in group}
    q, k, v = (by_role[role].pair for role in _ROLES)  # type: ignore[index]
    if q is None or k is None or v is None or q.partner != by_role["k"].name:
        return None
    if len({site.d_out // site.pair.heads for site in group if site.pair}) > 1:
        return None
    heads, start = {}, 0
    for site in group:
        count = site.pair.heads if site.pair else 0
        heads[site.role], start = tuple(range(start, start + count)), start + count
    return Pair(partner=v.partner, heads=start, roles=tuple(heads[role] for role in _ROLES))  # type: ignore[index]


def _with_partner(site: Site, partner: str | None, parts: set[str]) -> Site:
    """`site` with the packed one as its partner, or without one where its own became a part."""
    if site.pair is None or site.pair.partner not in parts:
        return site
    if partner is None:
        return dataclasses.replace(site, pair=None, unpaired="its partner is packed with what has none")
    return dataclasses.replace(site, pair=dataclasses.replace(site.pair, partner=partner))
