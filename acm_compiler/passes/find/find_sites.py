"""Find every place of a model that can become an ACM, and give the reason for each look-alike that cannot.

Sites are MLPs (`find_mlps`) and the projections of attention: linears with the role q, k, v or o, and packed ones.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from acm_compiler.passes.find.attention_roles import attends_projections, attention_role, other_layer
from acm_compiler.passes.find.bypass import find_bypass
from acm_compiler.passes.find.choose_graft import choose_graft
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.find_mlps import find_mlps
from acm_compiler.passes.find.head_pairs import with_pairs
from acm_compiler.passes.find.linears import QUANTISED_LINEAR, SEVERAL_MATRICES
from acm_compiler.passes.find.skips import ROUTER, adapters, answers_model, chooses_experts, routed_tokens, skips_of
from acm_compiler.passes.find.values import Linear, LookAlike, Region
from acm_compiler.site import LinearRef, Role, Site, Skip

_STACKED = "its parameter holds several matrices: make each a parameter, or stack their rows in one [rows, in]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A site and where it runs in the captured graph, one region per call, whose `x` is what the ACM will read."""

    site: Site
    runs: tuple[Region, ...]


def match_sites(model: nn.Module, flow: Dataflow) -> tuple[list[Match], list[Skip]]:
    """The sites of a model in the order of execution, with the regions of its captured graph, and its look-alikes.

    Every field of a site is filled but `layout`. Linears in no site and convolutions are skips with their MACs.
    """
    mlps, others = find_mlps(flow, model)
    mlps, refused = _refuse(flow, mlps)
    adapted = adapters(flow)
    known = {name for region in mlps for name in region.linears} | {name for a in adapted for name in a.linears}
    projections, packed = find_projections(flow, without=known)
    lookalikes = [*adapted, *packed, *refused, *others]
    matches: list[Match] = []
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    wrapped = {name for name, p in model.named_parameters(remove_duplicate=False) if is_traceable_wrapper_subclass(p)}
    for runs in _grouped([*mlps, *projections]):
        match = (
            _scripted(runs, scripted)
            or _wrapped(runs, wrapped)
            or _match(flow, runs, traced=isinstance(model, fx.GraphModule))
        )
        if isinstance(match, Match):
            matches.append(match)
        else:
            lookalikes[:0] = [LookAlike(linears=run.linears, reason=match) for run in runs]
    matches.sort(key=lambda match: flow.position[match.runs[0].output])
    matches = _with_pairs(flow, _uniquely_named(matches))
    taken = {name for match in matches for run in match.runs for name in run.linears}
    return matches, skips_of(flow, lookalikes, taken)


def _refuse(flow: Dataflow, mlps: Sequence[Region]) -> tuple[list[Region], list[LookAlike]]:
    """MLPs that are whole but serve another purpose than a block's: heads and routed experts."""
    kept: list[Region] = []
    refused: list[LookAlike] = []
    for region in mlps:
        reason = routed_tokens(flow, region) or answers_model(flow, region.x, region.output)
        if reason is None:
            kept.append(region)
        else:
            refused.append(LookAlike(linears=region.linears, reason=reason))
    return kept, refused


def _grouped(regions: Iterable[Region]) -> list[list[Region]]:
    """The runs of each site: regions with the same matrices, in the order of execution."""
    groups: dict[tuple[LinearRef, ...], list[Region]] = defaultdict(list)
    for region in regions:
        groups[region.refs].append(region)
    return list(groups.values())


def _match(flow: Dataflow, runs: Sequence[Region], *, traced: bool) -> Match | str:
    """The site that `runs` are, or why the model cannot take an ACM there."""
    reason = _read_elsewhere(flow, runs) or _differing(runs)
    if reason is not None:
        return reason
    placed = choose_graft(flow, runs, traced=traced)
    if isinstance(placed, str):
        return placed
    first, tokens = runs[0], [run.tokens for run in runs]
    bypasses = [find_bypass(flow, run.x, run.output) for run in runs]
    even = len(set(tokens)) == 1
    site = Site(
        name=placed.name,
        kind=first.kind,
        role=_joint_role(runs),
        d_in=first.d_in,
        d_out=first.d_out,
        dense_width=first.dense_width,
        act=first.act,
        first=first.first,
        last=first.last,
        residual=all(bypass.found for bypass in bypasses),
        residual_norm=any(bypass.norm for bypass in bypasses),
        calls=len(runs) if even else 1,  # calls of different lengths count as one, so that MACs stay exact
        tokens=tokens[0] if even else sum(tokens),
        graft=placed.graft,
        source=flow.values[first.output].source,
    )
    read = tuple(dataclasses.replace(run, x=x) for run, x in zip(runs, placed.inputs, strict=True))
    return Match(site=site, runs=read)


def _scripted(runs: Sequence[Region], scripted: Sequence[str]) -> str | None:
    """The reason, where a matrix of the site belongs to a part that TorchScript compiled."""
    for ref in runs[0].refs:
        part = next((name for name in scripted if ref.weight.startswith(f"{name}.")), None)
        if part is not None:
            return f"{part} was scripted or traced by TorchScript: put the module that it was made from in its place"
    return None


def _wrapped(runs: Sequence[Region], wrapped: Collection[str]) -> str | None:
    """The reason, where a matrix of the site is a tensor that holds others, as libraries keep quantised weights."""
    return QUANTISED_LINEAR if any(ref.weight in wrapped for ref in runs[0].refs) else None


def _read_elsewhere(flow: Dataflow, runs: Sequence[Region]) -> str | None:
    """Another reader of the site's matrices than its own linears: the ACM would leave it without them."""
    own = {name for run in runs for linear in run.linears for name in flow.linears[linear].nodes}
    for ref in runs[0].refs:
        for param in (ref.weight, ref.bias):
            for read in flow.reads.get(param, ()) if param else ():
                if read.reader not in own and read.overlaps(ref):
                    value = flow.values.get(read.reader)
                    where = "" if value is None else value.place
                    return f"weight read as a tensor: {param} is also read by {read.reader}{where}"
    return None


def _differing(runs: Sequence[Region]) -> str | None:
    """Runs that share their matrices but not what they do with them."""
    if len({(run.kind, run.act) for run in runs}) == 1 and (runs[0].kind != "linear" or _joint_role(runs)):
        return None
    ways = sorted(f"{run.kind} {run.role or run.act}" for run in runs)
    return f"its weights are used in different ways: {', '.join(dict.fromkeys(ways))}"


def _joint_role(runs: Sequence[Region]) -> Role | None:
    """Role of a projection in all its runs together: `qk` where queries and keys share it; None for an odd mix."""
    roles = "".join(role for role in "qkvo" if any(run.role is not None and role in run.role for run in runs))
    return next((known for known in get_args(Role) if known == roles), None)


def _with_pairs(flow: Dataflow, matches: Sequence[Match]) -> list[Match]:
    """The matches, projections with what is known of their partners."""
    projections = [m for m in matches if m.site.kind == "linear"]
    paired = with_pairs({m.runs[0].output: m.site for m in projections if len(m.runs) == 1}, flow)
    for match in projections:
        if len(match.runs) > 1:
            why = f"it runs {len(match.runs)} times in one call of the model"
            paired[match.site.name] = dataclasses.replace(match.site, unpaired=why)
    return [dataclasses.replace(m, site=paired.get(m.site.name, m.site)) for m in matches]


def _uniquely_named(matches: Sequence[Match]) -> list[Match]:
    """Sites of rewritten graphs may share the parameter that names them; number those."""
    counts: dict[str, int] = defaultdict(int)
    named = []
    for match in matches:
        name = match.site.name
        counts[name] += 1
        if counts[name] > 1:
            site = dataclasses.replace(match.site, name=f"{name}_{counts[name]}")
            match = dataclasses.replace(match, site=site)
        named.append(match)
    return named


def find_projections(flow: Dataflow, *, without: set[str]) -> tuple[list[Region], list[LookAlike]]:
    """Every run of an attention projection among the linears not in `without`, and look-alikes.

    A linear that packs projections is one site of the packed width: it needs no splitting, whatever the order of
    its rows, and keeps one product where the user had one.
    """
    found: list[Region] = []
    others: list[LookAlike] = []
    for name, linear in flow.linears.items():
        if name in without or not flow.values[name].live:
            continue
        stop = find_bypass(flow, linear.x, name).sums
        role = attention_role(flow, name, stop=stop)
        if role is None:
            continue
        reason = _refusal(flow, linear, role, stop=stop)
        if reason is None:
            found.append(_region(linear, cast(Role, role)))
        else:
            others.append(LookAlike(linears=(name,), reason=reason))
    return found, others


def _refusal(flow: Dataflow, linear: Linear, role: str, *, stop: Iterable[str]) -> str | None:
    """Reason why the projection cannot be a site; None where it can."""
    if linear.ref is None:
        # `q, k, v = self.w.unbind()` of a parameter [3, D, D]: by their roles, no experts
        stacked = role != "o" and linear.problem == SEVERAL_MATRICES
        problem = _STACKED if stacked else linear.problem
        return f"attention {role}: {problem}"
    if chooses_experts(flow, linear.name):
        return ROUTER
    if role not in get_args(Role):
        return f"packed projection ({role}): {' and '.join(role)} in one weight; split it into one linear each"
    if role == "o":
        # `head(norm(attend(self.query, streams, streams)))`: a pool of what the layers gave, then the model's head
        return None if attends_projections(flow, linear.x) else answers_model(flow, linear.x, linear.name)
    other = other_layer(flow, linear.name, stop=stop)
    if other is None:
        return None
    reader = flow.label(other, flow.linears[other].weight)
    return f"packed with another layer ({role}): {reader} reads a part of it; split it into one linear each"


def _region(linear: Linear, role: Role) -> Region:
    assert linear.ref is not None
    return Region(
        kind="linear",
        role=role,
        x=linear.x,
        output=linear.name,
        linears=(linear.name,),
        first=(linear.ref,),
        last=None,
        act="identity",
        nodes=frozenset(linear.nodes),
        d_in=linear.d_in,
        d_out=linear.d_out,
        dense_width=None,
        tokens=linear.tokens,
        own_bias=linear.own_bias,
    )
