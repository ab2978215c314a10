"""Gates that read the same tokens (q, k and v of one attention) share their first product.

before:  h_q = linear(x, w_q, b_q); h_k = linear(x, w_k, b_k); h_v = linear(x, w_v, b_v)
after:   h_q, h_k, h_v = split(linear(x, cat(w_q, w_k, w_v), cat(b_q, b_k, b_v)))

The tokens are read once instead of three times. Only for gates that are plain torch: where the gate is an operator
of its own there is nothing to share.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from acm_compiler.passes.capture.graph import upwards
from acm_compiler.passes.lower.acm_nodes import call_of, keeps_apart, learners_nodes, value_of

_LINEAR = (F.linear, torch._C._nn.linear)
_SAME_TOKENS = {"reshape", "view", "flatten", "to", "float", "contiguous"}


def merge_gates(graph: fx.Graph) -> int:
    """Merge in place; how many products went away."""
    groups: list[list[fx.Node]] = []
    for learners in learners_nodes(graph):
        first = _first_product(learners)
        if first is None or any(first in group for group in groups):
            continue
        group = next((group for group in groups if _share(group[0], first)), None)
        if group is None:
            groups.append([first])
        else:
            group.append(first)
    return sum(_merge(group) for group in groups if len(group) > 1)


def _share(linear: fx.Node, later: fx.Node) -> bool:
    """True if both read the same tokens, with the same values in them."""
    same = _tokens(linear.args[0]) is _tokens(later.args[0]) and _kind(linear) == _kind(later)
    return same and not keeps_apart(linear, later)


def _first_product(learners: fx.Node) -> fx.Node | None:
    """The linear of this ACM's gate that reads the ACM's own tokens."""
    call = call_of(learners)
    tokens = _tokens(call.x)
    above = upwards([call.k] if isinstance(call.k, fx.Node) else [], lambda node: node.all_input_nodes)
    return next((node for node in above if _is_linear(node) and _tokens(node.args[0]) is tokens), None)


def _is_linear(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _LINEAR and len(node.args) == 3 and None not in node.args


def _tokens(node: Any) -> fx.Node:
    """The tensor behind reshapes and casts."""
    while node.op == "call_method" and node.target in _SAME_TOKENS:
        node = node.args[0]
    return node


def _kind(linear: fx.Node) -> object:
    """Properties that must agree beside the tokens: the weights' type and the input's."""
    weight, x = value_of(linear.args[1]), value_of(linear.args[0])
    return (weight is not None and weight.dtype, x is not None and (x.dtype, x.dim()))


def _merge(linears: list[fx.Node]) -> int:
    graph, first = linears[0].graph, linears[0]
    weights, biases = ([node.args[place] for node in linears] for place in (1, 2))
    values = [value_of(weight) for weight in weights]
    sizes = [value.shape[0] for value in values if value is not None]
    if len(sizes) < len(values):
        return 0
    with graph.inserting_before(first):
        x = first.args[0]
        wide = graph.call_function(
            F.linear, (x, graph.call_function(torch.cat, (weights,)), graph.call_function(torch.cat, (biases,)))
        )
        parts = graph.call_function(torch.split, (wide, sizes, -1))
        pieces = [graph.call_function(operator.getitem, (parts, index)) for index in range(len(sizes))]
    for linear, piece in zip(linears, pieces, strict=True):
        piece.meta = {**linear.meta}
        linear.replace_all_uses_with(piece)
        graph.erase_node(linear)
    return len(linears) - 1
