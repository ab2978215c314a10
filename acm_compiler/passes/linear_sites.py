"""Finds the projections of attention: linears whose role is q, k, v or o."""

from __future__ import annotations

from typing import cast

from acm_compiler.passes.dataflow import Dataflow
from acm_compiler.passes.regions import LookAlike, Region
from acm_compiler.passes.residual import find_bypass
from acm_compiler.passes.roles import attention_role
from acm_compiler.passes.values import Linear
from acm_compiler.site import Role

PACKED = "packed projection"


def find_projections(flow: Dataflow, *, without: set[str]) -> tuple[list[Region], list[LookAlike]]:
    """Every run of an attention projection among the linears not in `without`, and those that are packed."""
    found: list[Region] = []
    others: list[LookAlike] = []
    for name, linear in flow.linears.items():
        if name in without or not flow.values[name].live:
            continue
        role = attention_role(flow, name, stop=find_bypass(flow, linear.x, name).sums)
        if role is None:
            continue
        if len(role) > 1:
            reason = f"{PACKED} ({role}): one weight holds {' and '.join(role)}; split it into one linear each"
            others.append(LookAlike(linears=(name,), reason=reason))
        elif linear.ref is None:
            others.append(LookAlike(linears=(name,), reason=f"attention {role}: {linear.problem}"))
        else:
            found.append(_region(linear, cast(Role, role)))
    return found, others


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
    )
