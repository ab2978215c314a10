"""Attention of float32 values on a CPU in bfloat16, where that is asked for, in graphs without gradients.

before:  y = scaled_dot_product_attention(q, k, v, ...)
after:   y = attention(q, k, v); with a mask, dropout or shared heads
         y = to(scaled_dot_product_attention(to(q, bfloat16), to(k, bfloat16), to(v, bfloat16), ...), float32)

Once the linears of a model are int8, attention is what takes most of its time, and processors multiply bfloat16 faster
than float32. Sums and the softmax stay float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from acm_compiler.acm.steps import ATTENTION
from acm_compiler.passes.capture.op_names import argument
from acm_compiler.passes.lower.acm_nodes import ATTENTIONS, attention_options, value_of

_NAMES = ("query", "key", "value")


def bfloat16_attention(graph: fx.Graph) -> int:
    """Convert in place; how many attentions were."""
    if any(node.target is torch._C._set_grad_enabled for node in graph.nodes):
        return 0
    return sum(_lower(node) for node in list(graph.nodes) if node.target in ATTENTIONS)


def _lower(node: fx.Node) -> bool:
    operands = [argument(node, i, name) for i, name in enumerate(_NAMES)]
    values = [value_of(operand) for operand in operands]
    if any(value is None or value.dtype != torch.float32 or value.device.type != "cpu" for value in values):
        return False
    options = _plain_options(node, values)
    with node.graph.inserting_before(node):
        if options is not None:
            result = node.graph.call_function(ATTENTION, tuple(operands), options)
        else:
            result = _between_conversions(node, operands)
    result.meta = {**node.meta}
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return True


def _plain_options(node: fx.Node, values: list[Any]) -> dict[str, Any] | None:
    """The options of `acm::attention`; None where it does not compute this attention."""
    mask, dropout, causal, scale, shared = attention_options(node)
    depth = values[0].shape[-1]
    if mask is not None or dropout or shared or not isinstance(depth, int) or any(v.dim() != 4 for v in values):
        return None
    if isinstance(causal, fx.Node) or isinstance(scale, fx.Node):
        return None
    if any(v.shape[:2] != values[0].shape[:2] for v in values):  # some of them are expanded
        return None
    return {"scale": depth**-0.5 if scale is None else scale, "causal": bool(causal)}


def _between_conversions(node: fx.Node, operands: list[Any]) -> fx.Node:
    """The same attention, of operands in bfloat16, in float32 again."""
    options = {name: value for name, value in node.kwargs.items() if name not in _NAMES}
    narrow = [_converted(operand, torch.bfloat16) for operand in operands]
    small = node.graph.call_function(F.scaled_dot_product_attention, (*narrow, *node.args[3:]), options)
    small.meta = {**node.meta}
    if (value := value_of(node)) is not None:
        small.meta["example_value"] = value.to(torch.bfloat16)
    return node.graph.call_method("to", (small, torch.float32))


def _converted(operand: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = operand.graph.call_method("to", (operand, dtype))
    value = value_of(operand)
    node.meta = {**operand.meta, "example_value": None if value is None else value.to(dtype)}
    return node
