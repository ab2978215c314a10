"""What stays dense: everything that does multiply-adds outside the chosen sites, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from acm_compiler.passes.capture.graph import Capture
from acm_compiler.passes.capture.op_names import ATTENTION, CONVOLUTIONS, OPAQUE, argument, op_name
from acm_compiler.passes.find.count_macs import count_macs
from acm_compiler.passes.find.dataflow import Dataflow, build_dataflow
from acm_compiler.passes.find.values import Linear
from acm_compiler.site import LinearRef, Site, Skip


def kept_dense(capture: Capture, sites: Sequence[Site], skips: Iterable[Skip] = ()) -> list[Skip]:
    """Everything that does multiply-adds outside `sites`, the largest first; the macs add up with the sites'.

    Linears and convolutions have the reason they have in `skips`, else `not selected`. Products of two values,
    such as attention's, are one entry per operation.
    """
    flow, macs = build_dataflow(capture), count_macs(capture)
    owners = {node: linear for linear in flow.linears.values() for node in linear.nodes}
    refs: dict[str, list[LinearRef]] = defaultdict(list)
    for site in sites:
        for ref in (*site.first, *([site.last] if site.last else [])):
            refs[ref.weight].append(ref)
    reasons = {skip.name: skip.reason for skip in skips}
    groups: dict[str, list[fx.Node]] = defaultdict(list)
    for node in capture.graph.nodes:
        linear = owners.get(node.name)
        if node.name in macs and not (linear and _belongs(linear, refs)):
            groups[_name(flow, node, linear)].append(node)
    kept = [
        Skip(
            name=name,
            reason=reasons.get(name) or _reason(nodes, owners),
            macs=sum(macs[node.name] for node in nodes),
            source=nodes[0].meta.get("source"),
        )
        for name, nodes in groups.items()
    ]
    return sorted(kept, key=lambda skip: -skip.macs)


def operation_name(flow: Dataflow, node: fx.Node) -> str:
    """What a user calls a convolution or an opaque call."""
    weight = argument(node, 1, "weight")
    param = weight.meta.get("param") if op_name(node) in CONVOLUTIONS and isinstance(weight, fx.Node) else None
    return flow.label(node.name, str(param or ""))


def _name(flow: Dataflow, node: fx.Node, linear: Linear | None) -> str:
    if linear is not None:
        return flow.label(linear.name, linear.weight)
    return operation_name(flow, node) if op_name(node) in CONVOLUTIONS | OPAQUE else op_name(node)


def _belongs(linear: Linear, refs: Mapping[str, Sequence[LinearRef]]) -> bool:
    """Whether a site's ACM takes the linear's place: they share rows of one weight."""
    if linear.ref is None:
        return False
    low, high = linear.ref.rows or (0, linear.d_out)
    rivals = refs.get(linear.ref.weight, ())
    return any(ref.rows is None or (ref.rows[0] < high and low < ref.rows[1]) for ref in rivals)


def _reason(nodes: Sequence[fx.Node], owners: Mapping[str, Linear]) -> str:
    op = op_name(nodes[0])
    if nodes[0].name in owners:
        return "not selected"
    if op in CONVOLUTIONS:
        return "convolution"
    kind = "attention's scores and values" if op in ATTENTION else "products of computed values"
    return f"{kind}, {len(nodes)} calls" if len(nodes) > 1 else kind
