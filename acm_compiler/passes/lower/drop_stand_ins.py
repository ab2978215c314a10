"""Drop the remains of calls around a dense region that a graft left: they compute nothing that anyone reads.

before:  zeros = z.new_zeros(...); hidden = relu(zeros); y = learners(z, ...)
after:   y = learners(z, ...)

Inductor drops such calls, too, but only after the passes here, to which they are readers of z. So are sizes that
nobody reads, which Dynamo leaves in the bodies of nested regions.
"""

from __future__ import annotations

import torch
from torch import fx

from acm_compiler.passes.lower.acm_nodes import recorded, value_of, writes

_STAND_IN = "new_zeros"
_CALLS = ("call_function", "call_method")
_SIZES = (int, torch.SymInt, torch.SymBool, torch.Size)


def drop_stand_ins(graph: fx.Graph) -> int:
    """Drop in place; how many calls went."""
    left: set[fx.Node] = set()
    for node in graph.nodes:
        made = node.op == "call_method" and node.target == _STAND_IN
        if made or (not left.isdisjoint(node.all_input_nodes) and node.op in _CALLS):
            left.add(node)
    dropped = 0
    for node in reversed(list(graph.nodes)):
        idle = (node in left and value_of(node) is not None) or _is_size(node)
        if idle and not node.users and not writes(node):
            graph.erase_node(node)
            dropped += 1
    return dropped


def _is_size(node: fx.Node) -> bool:
    return node.op in _CALLS and isinstance(recorded(node), _SIZES)
