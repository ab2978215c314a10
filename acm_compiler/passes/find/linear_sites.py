"""Finds the projections of attention: linears whose role is q, k, v or o, and those that pack several of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast, get_args

from acm_compiler.passes.find.attention_roles import attention_role, other_layer
from acm_compiler.passes.find.bypass import find_bypass
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.regions import LookAlike, Region
from acm_compiler.passes.find.values import Linear
from acm_compiler.site import Role


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
    """Why the projection cannot be a site."""
    if linear.ref is None:
        return f"attention {role}: {linear.problem}"
    if role not in get_args(Role):
        return f"packed projection ({role}): {' and '.join(role)} in one weight; split it into one linear each"
    other = other_layer(flow, linear.name, stop=stop) if role != "o" else None
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
