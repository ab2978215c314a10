"""ACMs that read each other's results, and the norms and attentions between them, become one call, on CPUs.

before:  q = gated_learners(x, ...); k = gated_learners(x, ...); v = gated_learners(x, ...)
         y = scaled_dot_product_attention(heads(q), heads(k), heads(v)); o = gated_learners(rows(y), ..., residual)
after:   (o,) = steps([x, ...], program)

In graphs of few tokens, where a call takes about as long as its products. What lies between two of them must leave
every value where the next one reads it: the places of values are sent through it and compared.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from acm_compiler.acm.steps import STEPS, Program, Step, gated_options
from acm_compiler.passes.capture.graph import leaves
from acm_compiler.passes.capture.op_names import RESHAPES, argument, name_of
from acm_compiler.passes.lower.acm_nodes import (
    ATTENTIONS,
    attention_options,
    call_of,
    is_idle_dropout,
    is_reshape,
    keeps_apart,
    put_reshape,
    value_of,
)
from acm_compiler.passes.lower.fold_norm import norm_at

FEW_TOKENS = 256
_VIEWS = (RESHAPES - {"view_as", "reshape_as"}) | {"transpose", "permute", "movedim"}
_MISFIT = object()
_TRANSFORMS = ("torch._functorch.", "torch._C._functorch")


def join_calls(graph: fx.Graph, acms: Iterable[fx.Node]) -> int:
    """Join those of `acms` that belong together, in place; how many calls of several steps there are now."""
    if any((getattr(node.target, "__module__", None) or "").startswith(_TRANSFORMS) for node in graph.nodes):
        return 0
    known = set(acms)
    groups = [_Group(known)]
    for node in list(graph.nodes):
        if groups[-1].ends_at(node):
            groups.append(_Group(known))
        groups[-1].take(node)
    joined = [group for group in groups if len(known.intersection(group.drafts)) > 1]
    for group in joined:
        group.join(graph)
    return len(joined)


class _Group:
    """Nodes that become one call, each with its kind, operands and options, in the order of the graph."""

    def __init__(self, acms: set[fx.Node]) -> None:
        self.acms = acms
        self.drafts: dict[fx.Node, tuple[str, list[Any], dict[str, Any]]] = {}
        self.places: dict[fx.Node, tuple[fx.Node, Tensor]] = {}  # of results and their views: where values lie in rows
        self.late: set[fx.Node] = set()  # what reads results otherwise

    def ends_at(self, node: fx.Node) -> bool:
        """True if a node cannot join because what it reads, or what is between, must run after the others."""
        if not self.drafts or not self._is_candidate(node):
            return False
        if self._is_late(node) or keeps_apart(next(reversed(self.drafts)), node):
            return True
        return node in self.acms and self._draft(node) is None

    def take(self, node: fx.Node) -> None:
        """Take a node in, or note what it does with results."""
        draft = self._draft(node) if self._is_candidate(node) and not self._is_late(node) else None
        if draft is not None:
            self.drafts[node] = draft
            value = value_of(node)
            assert value is not None
            self.places[node] = (node, _layout(value, draft[0]))
            return
        source = next((read for read in node.all_input_nodes if read in self.places), None)
        moved = None if source is None or self._is_late(node) else _moved(node, self.places[source][1])
        if source is not None and moved is not None:
            self.places[node] = (self.places[source][0], moved)
        elif source is not None or self._is_late(node):
            self.late.add(node)

    def _is_late(self, node: fx.Node) -> bool:
        return not self.late.isdisjoint(node.all_input_nodes)

    def _is_candidate(self, node: fx.Node) -> bool:
        value = value_of(node)
        if value is None or not all(isinstance(size, int) for size in value.shape):
            return False
        if node in self.acms:
            return value.shape[0] <= FEW_TOKENS
        if value.dtype != torch.float32 or value.device.type != "cpu" or value.dim() < 2 or not value.numel():
            return False
        if node.target in ATTENTIONS:
            return value.dim() == 4 and value.shape[0] * value.shape[2] <= FEW_TOKENS
        return (
            value.numel() <= FEW_TOKENS * value.shape[-1] and norm_at(node) is not None and _is_read_by(node, self.acms)
        )

    def _draft(self, node: fx.Node) -> tuple[str, list[Any], dict[str, Any]] | None:
        if node in self.acms:
            kind, options = "gated", gated_options(node.kwargs)
            operands = [self._rows(read) if read in self.places else read for read in call_of(node)]
        elif node.target in ATTENTIONS:
            kind, options = "attention", _attention_options(node)
            operands = [self._heads(argument(node, i, name)) for i, name in enumerate(("query", "key", "value"))]
        else:
            norm = norm_at(node)
            assert norm is not None
            weights = [value_of(weight) for weight in (norm.weight, norm.bias) if weight is not None]
            plain = all(weight is not None and weight.dtype == torch.float32 for weight in weights)
            if len(norm.nodes) != 1 or len(norm.shape) != 1 or value_of(norm.x) is None or not plain:
                return None
            kind, options = "norm", {"eps": norm.eps, "centred": norm.centred}
            operands = [self._rows(norm.x) if norm.x in self.places else norm.x, norm.weight, norm.bias]
        fits = _MISFIT not in operands and not any(isinstance(option, fx.Node) for option in options.values())
        return (kind, operands, options) if fits and options else None

    def _rows(self, read: fx.Node) -> Any:
        """The member whose result `read` gives row by row, [..., O]."""
        member, places = self.places[read]
        value = value_of(member)
        width = 0 if value is None else _width(value, self.drafts[member][0])
        same = places.shape[-1] == width and torch.equal(places.flatten(), torch.arange(places.numel()))
        return member if same else _MISFIT

    def _heads(self, read: fx.Node) -> Any:
        """The member whose result `read` gives as heads, [batch, heads, tokens, O / heads]."""
        member, places = self.places.get(read, (None, None))
        if member is None or places is None or places.dim() != 4:
            return _MISFIT
        return member if torch.equal(places, _layout(places, "attention")) else _MISFIT

    def join(self, graph: fx.Graph) -> None:
        """Put the call behind the last member, and what reads its results behind that."""
        members = list(self.drafts)
        for kind, operands, _ in self.drafts.values():
            if kind == "norm" and operands[0] not in self.drafts:
                operands[0] = _put_rows(operands[0], before=members[-1])
        reads = [read for _, operands, _ in self.drafts.values() for read in operands if read is not None]
        given = [read for read in dict.fromkeys(reads) if read not in self.drafts]
        numbers = {node: number for number, node in enumerate([*given, *members])}
        steps = [
            Step(kind, tuple(None if read is None else numbers[read] for read in operands), tuple(options.values()))
            for kind, operands, options in self.drafts.values()
        ]
        self._detach(graph)
        results = [node for node in members if node.users]
        behind = members[-1].next
        with graph.inserting_before(behind):
            program = Program(len(given), tuple(steps), tuple(numbers[node] for node in results))
            call = graph.call_function(STEPS, (given, program.text()))
            call.meta = {**members[-1].meta, "example_value": [value_of(node) for node in results]}
            for i, node in enumerate(results):
                node.replace_all_uses_with(self._put_result(call, i, node))
        for node in _between(members[0], members[-1]):
            if node in self.late or node in self.places:
                behind.prepend(node)
        for node in members:
            graph.erase_node(node)

    def _detach(self, graph: fx.Graph) -> None:
        """Let the members read nothing, and erase what only led from one to another."""
        for node in self.drafts:
            node.args, node.kwargs = (), {}
        for node in reversed(self.places):
            if node not in self.drafts and not node.users:
                graph.erase_node(node)

    def _put_result(self, call: fx.Node, number: int, member: fx.Node) -> fx.Node:
        """The result of that number, shaped as the member was, where the graph inserts."""
        rows = call.graph.call_function(operator.getitem, (call, number))
        rows.meta = {**member.meta}
        value, kind = value_of(member), self.drafts[member][0]
        if value is None or kind == "gated":
            return rows
        if kind == "norm":
            return put_reshape(rows, tuple(value.shape))
        batch, heads, tokens, depth = value.shape
        apart = put_reshape(rows, (batch, tokens, heads, depth))
        return call.graph.call_method("transpose", (apart, 1, 2))


def _put_rows(tensor: fx.Node, *, before: fx.Node) -> fx.Node:
    """Tokens [T, D] of a tensor [..., D]."""
    value = value_of(tensor)
    assert value is not None
    with tensor.graph.inserting_before(before):
        rows = put_reshape(tensor, (-1, value.shape[-1]))
    rows.meta = {**tensor.meta, "example_value": value.reshape(-1, value.shape[-1])}
    return rows


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes from one to another, but for these."""
    nodes = []
    node = first.next
    while node is not last:
        nodes.append(node)
        node = node.next
    return nodes


def _layout(value: Tensor, kind: str) -> Tensor:
    """Places in a result [T, O] of that kind, by where the tensor that the graph has for it holds their values."""
    places = torch.arange(value.numel())
    if kind != "attention":
        return places.view(value.shape)
    batch, heads, tokens, depth = value.shape
    return places.view(batch, tokens, heads, depth).transpose(1, 2)


def _width(value: Tensor, kind: str) -> int:
    """O of a result [T, O]."""
    return value.shape[1] * value.shape[3] if kind == "attention" else value.shape[-1]


def _moved(view: fx.Node, places: Tensor) -> Tensor | None:
    """Places of the values of a view, from those of its tensor; None for any other operation."""
    if is_idle_dropout(view):
        return places
    if view.op not in ("call_function", "call_method") or name_of(view.target) not in _VIEWS or view.kwargs:
        return None
    tensor, *sizes = view.args
    if not isinstance(tensor, fx.Node) or any(isinstance(size, fx.Node) for size in leaves(sizes)):
        return None
    called: Any = getattr(Tensor, str(view.target)) if view.op == "call_method" else view.target
    return called(places, *sizes)


def _attention_options(attention: fx.Node) -> dict[str, Any]:
    """Heads, length of a sequence, causal and scale of an attention that a program can hold; none of another one."""
    mask, dropout, causal, scale, shared = attention_options(attention)
    query, key = (value_of(argument(attention, i, name)) for i, name in enumerate(("query", "key")))
    if query is None or key is None or query.shape != key.shape or mask is not None or dropout or shared:
        return {}
    return {
        "heads": query.shape[1],
        "length": query.shape[2],
        "causal": bool(causal),
        "scale": query.shape[3] ** -0.5 if scale is None else scale,
    }


def _is_read_by(norm: fx.Node, acms: set[fx.Node]) -> bool:
    """True if an ACM reads a norm, as it is or reshaped."""
    return any(user in acms or (is_reshape(user) and _is_read_by(user, acms)) for user in norm.users)
