"""Chooses how an ACM gets into the live model in a site's place.

W  one module is the region, but for copies and dropout: the ACM replaces it
T  modules tile the region: the earlier ones pass their input on, the last becomes the ACM
S  functions between modules: the first linears stash their input, the last becomes the ACM that reads it
R  a linear is no module call: the enclosing module's graph is rewritten
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from acm_compiler.passes.capture.graph import ModuleCall, Signature
from acm_compiler.passes.capture.op_names import (
    ACTIVATIONS,
    COPIES,
    DROPOUTS,
    MOVES,
    RESHAPES,
    SCALES,
    SUMS,
    argument,
    op_set,
    written_nodes,
)
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.values import Region, Value
from acm_compiler.site import Graft

_ANY_WIDTH = COPIES | SCALES | SUMS | (ACTIVATIONS - {"glu"})
_SHARE_MEMORY = (COPIES | RESHAPES | MOVES | op_set("result overwritten alias_of")) - {"clone"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One run of a site among the module calls; `nodes` are its values, `all_nodes` those of all its runs."""

    flow: Dataflow
    region: Region
    nodes: frozenset[str]
    all_nodes: frozenset[str]

    def inside(self, call: ModuleCall) -> frozenset[str]:
        return self.flow.inside.get(call, frozenset())

    def stack(self, name: str) -> tuple[ModuleCall, ...]:
        return self.flow.values[name].stack

    def signature(self, call: ModuleCall) -> Signature | None:
        """The call's signature if it takes one positional tensor, gives one, and never runs elsewhere."""
        found = self.flow.capture.signatures.get(call)
        if found is None or len(found.inputs) != 1 or found.others or found.keywords or found.output is None:
            return None
        calls = self.flow.calls_of.get(call.fqn, ())
        return found if all(self.inside(c) & self.all_nodes for c in calls) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Place of a site's ACM, its graft, and the value that it will read in each run."""

    name: str
    graft: Graft
    inputs: tuple[str, ...]


def choose_graft(flow: Dataflow, runs: Sequence[Region], *, traced: bool) -> Placement | str:
    """One placement for all `runs` of a site; else why the live model cannot take an ACM there.

    `traced`: the model is an fx.GraphModule, whose own graph is rewritten.
    """
    nodes = [_closed(flow, run) for run in runs]
    all_nodes = frozenset().union(*nodes)
    places = [
        _Place(flow=flow, region=run, nodes=own, all_nodes=all_nodes) for run, own in zip(runs, nodes, strict=True)
    ]
    if traced and any(run.own_bias for run in runs):
        return "its bias is computed from parameters, which a graph of the user's own cannot keep beside an ACM"
    if traced:
        graft: Graft | str = Graft(kind="R", modules=("",))
    else:
        graft = _joined([_graft(place) for place in places])
    if isinstance(graft, str):
        return graft
    if graft.kind != "W" and (write := next(filter(None, map(_overwritten, places)), None)):
        return f"its input is overwritten{write.place} before its last layer, where an ACM reads it; write a new tensor"
    if graft.kind == "R":
        return Placement(name=_path_of(places[0], traced=traced), graft=graft, inputs=tuple(run.x for run in runs))
    name = graft.modules[0 if graft.kind == "W" else -1]
    return Placement(name=name, graft=graft, inputs=tuple(_entry(place, graft) for place in places))


def _entry(place: _Place, graft: Graft) -> str:
    """The argument of the first module that the graft replaces: a reshape away from what the first linear reads."""
    for call in place.stack(place.region.linears[0]):
        signature = place.flow.capture.signatures.get(call)
        if call.fqn in graft.modules and signature is not None:
            return signature.inputs[0]
    return place.region.x


def _joined(grafts: Sequence[Graft]) -> Graft | str:
    """One graft for all runs: the same one, or several modules of their own that share their weights."""
    first = grafts[0]
    if all(g == first for g in grafts):
        return first
    modules = tuple(dict.fromkeys(m for g in grafts for m in g.modules))
    if all(g.kind == "W" and g.dropout == first.dropout for g in grafts):
        return Graft(kind="W", modules=modules, dropout=first.dropout)
    return f"its weights are shared by modules built differently: {', '.join(modules)}"


def _closed(flow: Dataflow, region: Region) -> frozenset[str]:
    """The region's nodes and the reshapes that its linears' own modules do around the product."""
    nodes = set(region.nodes)
    for name in region.linears:
        stack = flow.values[name].stack
        inside = flow.inside.get(stack[-1], frozenset()) if stack else frozenset()
        extra = [flow.values.get(n) for n in inside - nodes]
        if all(v is not None and v.op in (COPIES | RESHAPES) - DROPOUTS for v in extra):
            nodes |= inside
    return frozenset(nodes)


def _graft(place: _Place) -> Graft:
    if place.region.own_bias:  # no module may be replaced that adds it
        return _retrace(place)
    return _whole(place) or _tiles(place) or _stash(place) or _retrace(place)


def _whole(place: _Place) -> Graft | None:
    """The outermost module that computes the region and nothing more than copies of its input and output."""
    # `self.mlp(x)` around `down(gelu(up(x)))` and a dropout
    for call in place.stack(place.region.output):
        signature = place.signature(call)
        inside = place.inside(call)
        if signature is None or not place.nodes <= inside:
            continue
        extra = [place.flow.values.get(name) for name in inside - place.nodes]
        if any(v is None or v.op not in COPIES | RESHAPES for v in extra) or not _same_tokens(
            place, signature, signature
        ):
            continue
        dropouts = [v for v in extra if v is not None and v.op in DROPOUTS]
        trailing = [d for d in dropouts if place.flow.feeds(place.region.output, d.name)]
        if all(_probability(d) == 0.0 for d in dropouts if d not in trailing):  # others must stay alive
            return Graft(kind="W", modules=(call.fqn,), dropout=_joint_probability(trailing))
    return None


def _tiles(place: _Place) -> Graft | None:
    """Modules one after the other that compute the region and nothing else, with no function between them."""
    # `self.down(self.act(self.up(x)))`
    last = _innermost(place, place.region.output)
    if last is None or len(place.region.linears) != 2 or place.flow.capture.method != "recorder":
        return None
    tiles: dict[ModuleCall, None] = {}
    for name in _in_order(place, place.nodes - place.inside(last)):
        tile = _outermost(place, name)
        if tile is None:
            return None
        tiles[tile] = None
    tiles[last] = None
    signatures = [place.signature(tile) for tile in tiles]
    if signatures[0] is None or signatures[-1] is None or None in signatures:
        return None
    if not _same_tokens(place, signatures[0], signatures[-1]):
        return None
    return Graft(kind="T", modules=tuple(tile.fqn for tile in tiles))


def _stash(place: _Place) -> Graft | None:
    """The modules of the first linears, which see the site's input, and that of the last."""
    # `self.down(F.silu(self.gate(x)) * self.up(x))`
    last = _innermost(place, place.region.output)
    firsts = dict.fromkeys(_outermost(place, name) for name in place.region.linears[:-1])
    if last is None or not firsts:
        return None
    signatures = [place.signature(call) if call else None for call in (*firsts, last)]
    found = [s for s in signatures if s is not None]
    if len(found) < len(signatures) or not _same_tokens(place, found[0], found[-1]):
        return None
    root = place.flow.root(place.region.x)
    if any(place.flow.root(s.inputs[0]) != root for s in found[:-1]):
        return None
    calls = [call for call in (*firsts, last) if call is not None]
    replaced = frozenset().union(*(place.inside(call) for call in calls))
    between = [place.flow.values[name] for name in _in_order(place, place.nodes - replaced)]
    width = 0 if all(v.op in _ANY_WIDTH for v in between) else _widest(place, found[:-1])
    return Graft(kind="S", modules=tuple(call.fqn for call in calls), stash_width=width)


def _retrace(place: _Place) -> Graft:
    """The innermost module whose forward holds the whole region."""
    # `F.linear(F.gelu(F.linear(x, self.w1)), self.w2)`
    common = ""
    for calls in zip(*(place.stack(name) for name in _in_order(place, place.nodes)), strict=False):
        if len(set(calls)) > 1:
            break
        common = calls[0].fqn
    return Graft(kind="R", modules=(common,))


def _overwritten(place: _Place) -> Value | None:
    """The first write to the site's input, or to memory that it may share, between its linears; None without one."""
    values, ran = place.flow.values, [place.flow.position[name] for name in place.region.linears]
    memory = _memory(place, place.region.x)
    for value in list(values.values())[min(ran) + 1 : max(ran)]:
        if any(_memory(place, node.name) == memory for node in written_nodes(value.node)):
            return value
    return None


def _memory(place: _Place, name: str) -> str:
    """The value that `name` is, or may be, a view of, or was before it was written to."""
    while (value := place.flow.values.get(name)) is not None:
        sources = [node.name for node in written_nodes(value.node)]
        if value.op in _SHARE_MEMORY:
            sources += value.args
        if not sources:
            break
        name = sources[0]
    return name


def _in_order(place: _Place, names: frozenset[str]) -> list[str]:
    """The values among `names`, in the order of execution."""
    return sorted((n for n in names if n in place.flow.values), key=place.flow.position.__getitem__)


def _outermost(place: _Place, name: str) -> ModuleCall | None:
    """The outermost module call around `name` that computes nothing outside the region, nor its output."""
    for call in place.stack(name):
        inside = place.inside(call)
        if inside <= place.nodes and place.region.output not in inside:
            return call
    return None


def _innermost(place: _Place, linear: str) -> ModuleCall | None:
    """The module call that is the linear itself, with no more than other parts of the region in it."""
    stack = place.stack(linear)
    return stack[-1] if stack and place.inside(stack[-1]) <= place.nodes else None


def _same_tokens(place: _Place, first: Signature, last: Signature) -> bool:
    """True if the ACM gives the shape and type that the modules give.

    It keeps all axes of its input but the last, and casts nothing, as `self.down(self.up(x.double())).float()` does.
    """
    values, region = place.flow.values, place.region
    before, after = values.get(first.inputs[0]), values.get(last.output or "")
    if before is None or after is None or before.shape is None or after.shape is None:
        return False
    cast = before.dtype != values[region.x].dtype or after.dtype != values[region.output].dtype
    return before.shape[:-1] == after.shape[:-1] and not cast


def _widest(place: _Place, signatures: Sequence[Signature]) -> int:
    shapes = [place.flow.values[s.output].shape for s in signatures if s.output is not None]
    return max(shape[-1] for shape in shapes if shape)


def _probability(dropout: Value) -> float:
    probability = argument(dropout.node, 1, "p", 0.5)
    return float(probability) if isinstance(probability, (int, float)) else 0.0


def _joint_probability(dropouts: Sequence[Value]) -> float:
    """The chance that an entry falls to at least one of several dropouts in a row."""
    if len(dropouts) == 1:
        return _probability(dropouts[0])
    return 1.0 - math.prod(1.0 - _probability(dropout) for dropout in dropouts)


def _path_of(place: _Place, *, traced: bool) -> str:
    """Path of the ACM of graft R: the place of the last linear's module, else one beside its parameter.

    In a live model a module that is called, or keeps a bias, stays: its forward uses the weight. So does one of whose
    parameters others read: `F.linear(h, self.down.weight) + self.down.bias`.
    """
    region = place.region
    ref = region.last or region.first[0]
    owner, _, leaf = ref.weight.rpartition(".")
    around = {call.fqn: call for call in place.stack(region.output)}
    stays = region.own_bias if owner not in around else not traced or not place.inside(around[owner]) <= place.nodes
    own = {name for ref in region.refs for name in (ref.weight, ref.bias)}
    stays = stays or any(name.startswith(f"{owner}.") and name not in own for name in place.flow.reads)
    if owner and leaf == "weight" and ref.rows is None and not stays:
        return owner
    return f"{ref.weight}_{region.role or 'acm'}"
