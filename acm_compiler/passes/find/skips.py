"""Operations that stay dense: reasons for look-alikes, and every multiply-add outside the chosen sites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from acm_compiler.passes.capture.op_names import (
    ATTENTION,
    CONVOLUTIONS,
    COPIES,
    OPAQUE,
    PRODUCTS,
    QUANTISED,
    RESHAPES,
    SCALES,
    SUMS,
    argument,
    op_name,
    op_set,
)
from acm_compiler.passes.find.bypass import find_bypass
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.linears import QUANTISED_LINEAR
from acm_compiler.passes.find.values import Linear, LookAlike, Region
from acm_compiler.planning.planner import NOT_SELECTED
from acm_compiler.site import LinearRef, Site, Skip

CLASSIFIER = "classifier: its output has no bypass and is the model's prediction"
_NEITHER = "neither a layer of an MLP nor a projection of attention"
_LORA = "LoRA adapters: merge them into the weights first (merge_and_unload)"
_ROUTED = "mixture of experts: it sees only the tokens routed to it; experts are not converted"
ROUTER = "router: its output chooses experts"
_PICKS = op_set("index getitem index_select gather take_along_dim masked_select")
_SCALED = COPIES | RESHAPES | SCALES
_ENDS = PRODUCTS | CONVOLUTIONS | {"linear", "scaled_dot_product_attention", "embedding"}


def answers_model(flow: Dataflow, x: str, output: str) -> str | None:
    """The reason, where `output`, made from `x`, becomes the model's output without passing a bypass or a weight."""
    return CLASSIFIER if not find_bypass(flow, x, output).found and _reaches_output(flow, output) else None


def routed_tokens(flow: Dataflow, region: Region) -> str | None:
    """The reason, where data decides which tokens the region sees."""
    x = flow.values[flow.root(region.x)]
    return _ROUTED if x.op in _PICKS and len(flow.live_args(x.name)) > 1 else None


def skips_of(flow: Dataflow, lookalikes: Sequence[LookAlike], taken: set[str]) -> list[Skip]:
    """One skip per linear outside sites (`taken`) and per convolution, in the order of execution.

    Of several look-alikes with a linear in common the first gives the reason; those with a site's linear give
    none. Repeated calls are one skip, MACs added up.
    """
    reasons: dict[str, str] = {}
    for lookalike in lookalikes:
        if taken.isdisjoint(lookalike.linears):
            reasons = dict.fromkeys(lookalike.linears, lookalike.reason) | reasons
    skips: dict[tuple[str, str], Skip] = {}
    for value in flow.values.values():
        linear = flow.linears.get(value.name)
        if linear is not None and value.name not in taken:
            name = flow.label(value.name, linear.weight)
            reason = reasons.get(value.name) or _plain_reason(flow, linear)
        elif value.op in CONVOLUTIONS:
            name, reason = operation_name(flow, value.node), "convolution"
        elif value.op in OPAQUE:
            name, reason = operation_name(flow, value.node), f"opaque call: {value.op} hides its linears"
        elif value.op in QUANTISED:
            name, reason = flow.label(value.name, value.stack[-1].fqn if value.stack else ""), QUANTISED_LINEAR
        else:
            continue
        number = sum(flow.macs.get(node, 0) for node in (linear.nodes if linear else (value.name,)))
        before = skips[name, reason].macs if (name, reason) in skips else 0
        skips[name, reason] = Skip(name=name, reason=reason, macs=before + number, source=value.source)
    return list(skips.values())


def adapters(flow: Dataflow) -> list[LookAlike]:
    """Linears with a low-rank branch beside them: `base(x) + scale * up(down(x))`."""
    found = []
    for up in flow.linears.values():
        down = flow.linears.get(flow.behind(up.x, _SCALED))
        if down is None:
            continue
        source = flow.root(down.x)
        for base in _added_to(flow, up.name):
            if flow.root(flow.linears[base].x) == source:
                found += [LookAlike(linears=(name,), reason=_LORA) for name in (down.name, up.name, base)]
    return found


def _added_to(flow: Dataflow, name: str) -> list[str]:
    """The linears that the value is added to, perhaps scaled."""
    readers = flow.readers(name, lambda value: value.op in _SCALED)
    sums = [value.name for _, value in readers if value.op == "add"]
    roots = [flow.behind(arg, _SCALED) for total in sums for arg in flow.live_args(total)]
    return [root for root in roots if root in flow.linears and root != name]


def _reaches_output(flow: Dataflow, name: str) -> bool:
    """True if the value flows to the model's output, and into no other weight or attention."""
    readers = [value for _, value in flow.readers(name, lambda value: value.op not in _ENDS)]
    reached = not flow.outputs.isdisjoint([name, *(value.name for value in readers)])
    return reached and all(value.op not in _ENDS for value in readers)


def chooses_experts(flow: Dataflow, name: str) -> bool:
    """True if the largest of the value's entries are picked, as those of a router are."""
    scored = COPIES | RESHAPES | SUMS | {"softmax", "sigmoid"}
    return any(value.op == "topk" for _, value in flow.readers(name, lambda value: value.op in scored))


def _plain_reason(flow: Dataflow, linear: Linear) -> str:
    if linear.problem:
        return linear.problem
    if chooses_experts(flow, linear.name):
        return ROUTER
    return answers_model(flow, linear.x, linear.name) or _NEITHER


def kept_dense(flow: Dataflow, sites: Sequence[Site], skips: Iterable[Skip]) -> list[Skip]:
    """Everything that does multiply-adds outside `sites`, the largest first; the macs add up with the sites'.

    Linears and convolutions have the reason they have in `skips`, those of sites that stay dense NOT_SELECTED. Products
    of two values, such as attention's, are one entry per operation.
    """
    owners = {node: linear for linear in flow.linears.values() for node in linear.nodes}
    refs: dict[str, list[LinearRef]] = defaultdict(list)
    for site in sites:
        for ref in site.refs:
            refs[ref.weight].append(ref)
    reasons = {skip.name: skip.reason for skip in skips}
    groups: dict[str, list[fx.Node]] = defaultdict(list)
    for node in flow.capture.graph.nodes:
        linear = owners.get(node.name)
        if node.name in flow.macs and not (linear and _belongs(linear, refs)):
            groups[_name(flow, node, linear)].append(node)
    kept = [
        Skip(
            name=name,
            reason=reasons.get(name) or _reason(nodes, owners),
            macs=sum(flow.macs[node.name] for node in nodes),
            source=nodes[0].meta.get("source"),
        )
        for name, nodes in groups.items()
    ]
    return sorted(kept, key=lambda skip: -skip.macs)


def operation_name(flow: Dataflow, node: fx.Node) -> str:
    """Name of a convolution or an opaque call for users."""
    weight = argument(node, 1, "weight")
    param = weight.meta.get("param") if op_name(node) in CONVOLUTIONS and isinstance(weight, fx.Node) else None
    return flow.label(node.name, str(param or ""))


def _name(flow: Dataflow, node: fx.Node, linear: Linear | None) -> str:
    if linear is not None:
        return flow.label(linear.name, linear.weight)
    return operation_name(flow, node) if op_name(node) in CONVOLUTIONS | OPAQUE else op_name(node)


def _belongs(linear: Linear, refs: Mapping[str, Sequence[LinearRef]]) -> bool:
    """True if a site's ACM takes the linear's place: they share rows of one weight."""
    if linear.ref is None:
        return False
    low, high = linear.ref.rows or (0, linear.d_out)
    rivals = refs.get(linear.ref.weight, ())
    return any(ref.rows is None or (ref.rows[0] < high and low < ref.rows[1]) for ref in rivals)


def _reason(nodes: Sequence[fx.Node], owners: Mapping[str, Linear]) -> str:
    op = op_name(nodes[0])
    if nodes[0].name in owners:
        return NOT_SELECTED
    kind = "attention's scores and values" if op in ATTENTION else "products of computed values"
    return f"{kind}, {len(nodes)} calls" if len(nodes) > 1 else kind
