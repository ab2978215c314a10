"""The ACMs of a graph of Dynamo or torch.export: their nodes, and where in the user's model and code they come from."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from acm_compiler.acm import gated_learners, ops
from acm_compiler.acm.arguments import GateArguments, GatedArguments, LearnersArguments
from acm_compiler.passes.capture.op_names import argument, written_tensors
from acm_compiler.sources.user_code import traced_line

LEARNERS = (ops.LEARNERS, ops.LEARNERS.default)
GATES = (ops.GATE, ops.GATE.default)
GATED = (gated_learners.GATED, gated_learners.GATED.default)
_RESHAPES = {"reshape", "view", "flatten", "unflatten"}
_ATEN_RESHAPES: tuple[Any, ...] = (
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.unflatten.int,
)
# where Dynamo and torch.export keep the fake tensor of a node
_FAKES = ("example_value", "val")
_GRADIENT_SWITCHES = (
    torch._C._set_grad_enabled,
    torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
)
_DROPOUTS: dict[Any, tuple[int, str]] = {F.dropout: (2, "training"), torch.ops.aten.dropout.default: (2, "train")}
ATTENTIONS = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
NORM_EPS = "norm_eps"
"""The argument of `acm::gated_learners` that says whether a norm belongs to it."""
NORM_CENTRED = "norm_centred"
"""The argument that says that it is a LayerNorm, no RMSNorm."""


def learners_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Calls of `acm::learners`, in order."""
    return _calls(graph, LEARNERS)


def acm_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Calls of `acm::learners` and of `acm::gated_learners`, in order."""
    return _calls(graph, (*LEARNERS, *GATED))


def _calls(graph: fx.Graph, targets: tuple[object, ...]) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def call_of(acm: fx.Node) -> Any:
    """The arguments of one of the operators by name: nodes, in its `GateArguments` or the like."""
    kind: Any = GatedArguments if acm.target in GATED else GateArguments if acm.target in GATES else LearnersArguments
    return kind(*acm.args)


def gate_of(acm: fx.Node) -> fx.Node | None:
    """The operator that chooses an ACM's k, its own where it is both; None where k is chosen otherwise."""
    gate = acm if acm.target in GATED else call_of(acm).k
    return gate if isinstance(gate, fx.Node) and gate.target in (*GATED, *GATES) else None


def value_of(node: object) -> Tensor | None:
    """The fake tensor that was recorded for a node; None for anything else."""
    value = recorded(node)
    return value if isinstance(value, Tensor) else None


def recorded(node: object) -> Any:
    """The fake tensor, or symbolic number, that was recorded for a node; None for anything else."""
    return next((node.meta[key] for key in _FAKES if key in node.meta), None) if isinstance(node, fx.Node) else None


def with_value(meta: dict[str, Any], value: Tensor) -> dict[str, Any]:
    """The `meta` of a node for another one in its graph, whose fake tensor is `value`."""
    return {**meta, **{key: value for key in _FAKES if key in meta}}


def is_reshape(node: fx.Node) -> bool:
    """True for what keeps the values of its first argument, a tensor, in their order."""
    return node.target in _RESHAPES if node.op == "call_method" else node.target in _ATEN_RESHAPES


def is_idle_dropout(node: fx.Node) -> bool:
    """True for a dropout that drops nothing, as in eval mode."""
    return node.target in _DROPOUTS and argument(node, *_DROPOUTS[node.target], True) is False


def attention_options(node: fx.Node) -> list[Any]:
    """Mask, dropout, whether it is causal, scale, and whether heads share keys, of one of the `ATTENTIONS`."""
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return [argument(node, i, name) for i, name in enumerate(names, start=3)]


def put_reshape(tensor: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """A reshape of `tensor` where the graph inserts, called as that graph's nodes are."""
    if "val" in tensor.meta:
        return tensor.graph.call_function(torch.ops.aten.reshape.default, (tensor, list(shape)))
    return tensor.graph.call_method("reshape", (tensor, shape))


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that reads this one, and reads it once."""
    users = list(node.users)
    # x + x has one user that reads twice
    return users[0] if len(users) == 1 and users[0].args.count(node) == 1 else None


def keeps_apart(first: fx.Node, last: fx.Node) -> bool:
    """True if a call between these two writes to a tensor or switches gradients: then neither moves to the other."""
    node = first.next
    while node is not last:
        if writes(node) or node.target in _GRADIENT_SWITCHES:
            return True
        node = node.next
    return False


def writes(node: fx.Node) -> bool:
    """True if this call writes to a tensor."""
    if node.op not in ("call_function", "call_method"):
        return False
    called: Any = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    values = fx.node.map_arg((node.args, node.kwargs), recorded)
    return called is not None and bool(written_tensors(called, *values))


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
