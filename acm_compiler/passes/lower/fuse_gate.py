"""Gate and learners of an ACM become one operator, in graphs through which nothing is differentiated.

before:  k = gate(x, *w_gate, view(knob, float32), k_lo, k_hi); y = learners(x, k, *w, residual)
after:   y = gated_learners(x, *w_gate, knob, k_lo, k_hi, *w, residual)

One call instead of three, and no rule of autograd around it: what a site of a small model, or of one image, costs most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from acm_compiler.acm.arguments import GatedArguments
from acm_compiler.passes.lower.acm_nodes import GATED, call_of, gate_of, learners_nodes


def fuse_gate(graph: fx.Graph) -> int:
    """Fuse in place; how many ACMs became one operator."""
    if any(node.target is torch._C._set_grad_enabled for node in graph.nodes):
        return 0
    return sum(_fuse(node) for node in learners_nodes(graph))


def _fuse(learners: fx.Node) -> bool:
    call, gate = call_of(learners), gate_of(learners)
    if gate is None or len(gate.users) > 1 or call_of(gate).x is not call.x:
        return False
    knob: Any = call_of(gate).knob
    tensors = call._asdict() | call_of(gate)._asdict() | {"knob": _bits(knob)}
    del tensors["k"]
    whole = tuple(GatedArguments(**tensors))
    with learners.graph.inserting_before(learners):
        fused = learners.graph.call_function(GATED[0], whole, {**gate.kwargs, **learners.kwargs})
    fused.meta = {**learners.meta}
    learners.replace_all_uses_with(fused)
    for node in (learners, gate, *([knob] if len(knob.users) == 1 and _is_view(knob) else [])):
        learners.graph.erase_node(node)
    return True


def _bits(knob: fx.Node) -> Any:
    """The integers that a knob is a view of; itself where it is none."""
    return knob.args[0] if _is_view(knob) else knob


def _is_view(knob: fx.Node) -> bool:
    """True for integers read as the bits of a float, in Dynamo's graphs and in those of torch.export."""
    called = knob.op == "call_method" and knob.target == "view"
    return (called or knob.target is torch.ops.aten.view.dtype) and knob.args[1:] == (torch.float32,)
