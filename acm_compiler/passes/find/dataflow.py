"""The captured graph as values that flow: one name per operation, linears resolved, bookkeeping removed.

before:  view = w.t(); m = torch.matmul(x, view); h = m + b
after:   h = linear(x), with h's LinearRef(weight="w", bias="b")
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import networkx as nx
from torch import fx

from acm_compiler.passes.capture.graph import Capture, ModuleCall
from acm_compiler.passes.capture.op_names import COPIES, RESHAPES, data_operands, op_name
from acm_compiler.passes.find.count_macs import count_macs
from acm_compiler.passes.find.fused_ops import fold_norms, fold_softmax
from acm_compiler.passes.find.linears import fuse_bias, resolve_linear
from acm_compiler.passes.find.values import Linear, Read, Value
from acm_compiler.passes.find.weight_views import Views, WeightView, view_of


@dataclass(slots=True, kw_only=True)
class Dataflow:
    """The values of a capture and its MACs; analyses read it, nothing changes it.

    `macs`: multiply-adds by captured node. `graph`: a DiGraph over value names, an edge is data that flows.
    `values`: what each computes. `inside`: the live values computed during each module call, bookkeeping included;
    `calls_of`: those calls by module path.
    `reads`: who reads each parameter. `outputs`: the values that the model returns. `position`: when each runs.
    """

    capture: Capture
    macs: dict[str, int]
    graph: nx.DiGraph
    values: dict[str, Value]
    linears: dict[str, Linear]
    outputs: frozenset[str]
    inside: dict[ModuleCall, frozenset[str]]
    calls_of: dict[str, list[ModuleCall]]
    reads: dict[str, list[Read]]
    position: dict[str, int]
    _ancestors: dict[str, int] = field(default_factory=dict)
    _bit: dict[str, int] = field(default_factory=dict)

    def consumers(self, name: str) -> list[str]:
        """Values that read the value, each once."""
        return list(self.graph.successors(name))

    def live_args(self, name: str) -> list[str]:
        """Operands of the value that depend on the model's inputs, repeats included."""
        return [a for a in self.values[name].args if self.values[a].live]

    def readers(
        self, name: str, through: Callable[[Value], bool], *, stop: Iterable[str] = ()
    ) -> Iterator[tuple[str, Value]]:
        """Each value that reads `name`, or what it becomes `through` others, with the name that it reads.

        Depth first; a value is passed once, one in `stop` never.
        """
        todo, seen = [name], {name, *stop}
        while todo:
            name = todo.pop()
            for user in self.graph.successors(name):
                value = self.values[user]
                yield name, value
                if user not in seen and through(value):
                    seen.add(user)
                    todo.append(user)

    def behind(self, name: str, ops: frozenset[str]) -> str:
        """The value that `name` is made of, and of no other live one, by operations in `ops`."""
        while self.values[name].op in ops and len(live := self.live_args(name)) == 1:
            name = live[0]
        return name

    def feeds(self, source: str, target: str) -> bool:
        """True if `target` is `source` or computed from it: nx.ancestors, kept as bit sets for all values."""
        if not self._ancestors:
            for i, name in enumerate(nx.topological_sort(self.graph)):
                self._bit[name] = mask = 1 << i
                for previous in self.graph.predecessors(name):
                    mask |= self._ancestors[previous]
                self._ancestors[name] = mask
        return bool(self._ancestors[target] & self._bit[source])

    def label(self, name: str, weight: str) -> str:
        """Name of an operation for users: the module that computes nothing else, else its weight's name."""
        stack = self.values[name].stack
        parts = self.linears[name].nodes if name in self.linears else (name,)
        rest = self.inside.get(stack[-1], frozenset()).difference(parts) if stack else ()
        plain = all(n in self.values and self.values[n].op in COPIES | RESHAPES for n in rest)
        return stack[-1].fqn if stack and plain else weight or name

    def root(self, name: str) -> str:
        """The value that `name` is a copy or a row-major reshape of, with the same last axis."""
        while True:
            value = self.values[name]
            if value.op not in COPIES | RESHAPES or not value.args or not value.shape:
                return name
            previous = self.values[value.args[0]]
            if not previous.shape or previous.shape[-1] != value.shape[-1]:
                return name
            name = previous.name


def build_dataflow(capture: Capture) -> Dataflow:
    """The dataflow graph of `capture`, which is left unchanged."""
    values, views, outputs = _read_nodes(capture.graph)
    reads, inside = _reads(values, views), _inside(values)
    linears = _linears(values, views)
    for linear in linears.values():
        for inner in linear.nodes[:-1]:
            del values[inner]
        args = (linear.x,) if linear.ref is not None else values[linear.name].args
        values[linear.name] = dataclasses.replace(values[linear.name], op="linear", args=args)
    values |= fold_softmax(values)
    values |= fold_norms(values)
    calls_of: dict[str, list[ModuleCall]] = defaultdict(list)
    for call in inside:
        calls_of[call.fqn].append(call)
    graph = nx.DiGraph()
    graph.add_nodes_from(values)
    graph.add_edges_from((arg, value.name) for value in values.values() for arg in value.args)
    _drop_folded(graph, values, outputs, used={node.name for node in capture.graph.nodes if node.users})
    return Dataflow(
        capture=capture,
        macs=count_macs(capture),
        graph=graph,
        values=values,
        linears=linears,
        outputs=frozenset(outputs),
        inside=inside,
        calls_of=calls_of,
        reads=reads,
        position={name: i for i, name in enumerate(values)},
    )


def _read_nodes(graph: fx.Graph) -> tuple[dict[str, Value], dict[str, Views], set[str]]:
    """The value of every node, the parameter views among them, and the names of what is returned."""
    values: dict[str, Value] = {}
    views: dict[str, Views] = {}
    outputs: set[str] = set()
    for node in graph.nodes:
        operands = data_operands(node)
        if node.op == "output":
            outputs = {operand.name for operand in operands}
            continue
        value = _value(node, [values[o.name] for o in operands])
        values[node.name] = value
        if node.op == "get_attr":
            if value.learned and value.shape is not None:
                views[node.name] = WeightView.whole(node.meta["param"], value.shape)
        elif operands and not value.live and operands[0].name in views:
            view = view_of(node, value.op, views[operands[0].name])
            if view is not None:
                views[node.name] = view
    return values, views, outputs


def _value(node: fx.Node, args: list[Value]) -> Value:
    meta = node.meta
    if node.op == "call_function":
        live, learned = any(a.live for a in args), any(a.learned for a in args)
    else:
        live = node.op == "placeholder" and not meta.get("const")
        learned = node.op == "get_attr" and meta.get("param") is not None and not meta.get("is_buffer")
    return Value(
        name=node.name,
        op=op_name(node),
        args=tuple(a.name for a in args),
        shape=meta.get("shape"),
        live=live,
        learned=learned,
        stack=tuple(meta.get("stack", ())),
        source=meta.get("source"),
        node=node,
    )


def _reads(values: Mapping[str, Value], views: Mapping[str, Views]) -> dict[str, list[Read]]:
    """Per parameter, the operations that use it or a view of it for more than another view."""
    reads: dict[str, list[Read]] = defaultdict(list)
    for value in values.values():
        if value.name in views:
            continue
        for arg in dict.fromkeys(value.args):
            seen = views.get(arg)
            for view in seen if isinstance(seen, tuple) else (seen,) if seen else ():
                reads[view.param].append(Read(reader=value.name, view=view))
    return dict(reads)


def _inside(values: Mapping[str, Value]) -> dict[ModuleCall, frozenset[str]]:
    inside: dict[ModuleCall, set[str]] = defaultdict(set)
    for value in values.values():
        if value.live:
            for call in value.stack:
                inside[call].add(value.name)
    return {call: frozenset(names) for call, names in inside.items()}


def _linears(values: Mapping[str, Value], views: Mapping[str, Views]) -> dict[str, Linear]:
    consumers: dict[str, list[str]] = defaultdict(list)
    for value in values.values():
        for arg in dict.fromkeys(value.args):
            consumers[arg].append(value.name)
    linears = {}
    for value in values.values():
        linear = resolve_linear(value, values, views)
        if linear is not None:
            linear = fuse_bias(linear, consumers[value.name], values, views)
            linears[linear.name] = linear
    return linears


def _drop_folded(graph: nx.DiGraph, values: dict[str, Value], outputs: set[str], *, used: set[str]) -> None:
    """Take away what only a folded operation used: values that had consumers and have none now."""
    for name in reversed(list(nx.topological_sort(graph))):
        kept = name in outputs or name not in used or values[name].op == "linear"
        if not kept and graph.out_degree(name) == 0:
            graph.remove_node(name)
            del values[name]
