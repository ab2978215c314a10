"""The ACMs of a Dynamo graph: their nodes, and where in the user's model and code they come from."""

from __future__ import annotations

import re

from torch import Tensor, fx

from acm_compiler.acm import ops
from acm_compiler.passes.source_lines import traced_line

LEARNERS = (ops.LEARNERS, ops.LEARNERS.default)
GATES = (ops.GATE, ops.GATE.default)
GATED = (ops.GATED, ops.GATED.default)
RESIDUAL = 9
"""Position of the residual among the arguments of `acm::learners`."""
GATED_RESIDUAL = 15
"""Position of the residual among the arguments of `acm::gated_learners`."""


def learners_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Calls of `acm::learners`, in order."""
    return _calls(graph, LEARNERS)


def acm_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Calls of `acm::learners` and of `acm::gated_learners`, in order."""
    return _calls(graph, (*LEARNERS, *GATED))


def _calls(graph: fx.Graph, targets: tuple[object, ...]) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def value_of(node: object) -> Tensor | None:
    """The fake tensor that Dynamo recorded for a node; None for anything else."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def site_of(node: fx.Node) -> str:
    """The site's name as far as the graph knows it: the path of its module below the compiled one."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    below = re.sub(r"^L\['\w+'\]\.?", "", path)
    plain = re.sub(r"\._modules\['([^']+)'\]|\['?([^'\]]+)'?\]", lambda match: "." + (match[1] or match[2]), below)
    return plain.strip(".") or "the compiled module"


def line_of(node: fx.Node) -> str | None:
    """`file.py:line` of the user's code that called it."""
    return traced_line(node.stack_trace)
