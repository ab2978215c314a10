"""Drop the remains of calls around a dense region that a graft left: they compute nothing that anyone reads.

before:  zeros = z.new_zeros(...); hidden = relu(zeros); y = learners(z, ...)
after:   y = learners(z, ...)

Inductor drops such calls, too, but only after the passes here, to which they are readers of z.
"""

from __future__ import annotations

from torch import fx

from acm_compiler.passes.lower.acm_nodes import value_of, writes

_STAND_IN = "new_zeros"


def drop_stand_ins(graph: fx.Graph) -> int:
    """Drop in place; how many calls went."""
    left: set[fx.Node] = set()
    for node in graph.nodes:
        made = node.op == "call_method" and node.target == _STAND_IN
        if made or (not left.isdisjoint(node.all_input_nodes) and node.op in ("call_function", "call_method")):
            left.add(node)
    dropped = 0
    for node in reversed(list(graph.nodes)):
        if node in left and not node.users and value_of(node) is not None and not writes(node):
            graph.erase_node(node)
            dropped += 1
    return dropped
