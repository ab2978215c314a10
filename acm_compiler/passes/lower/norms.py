"""Norms of a graph: LayerNorm and RMSNorm by torch's own operators, and RMSNorm as transformers writes it out.

h = x.to(float32); z = weight * (h * rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from acm_compiler.passes.capture.op_names import argument, name_of
from acm_compiler.passes.lower.acm_nodes import recorded, value_of

_CALLED = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
_EPS = 1e-5  # torch's of a LayerNorm, where a call leaves it out
_REMARK = torch.ops.aten._assert_tensor_metadata.default  # what torch.export notes of a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundNorm:
    """A norm: the nodes that are it, the last one first, its input, its weights, and the features of one row."""

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    weight: Any
    bias: Any
    eps: Any
    centred: bool
    shape: tuple[Any, ...]


def norm_at(node: fx.Node) -> FoundNorm | None:
    """The norm whose result is this node; None where it is none, or one whose intermediate values something reads."""
    if _name(node) in _CALLED:
        return _called(node)
    return _written_out(node) if _name(node) == "mul" else None


def remarks_on(node: fx.Node) -> list[fx.Node]:
    """Readers of a node that compute nothing."""
    return [user for user in node.users if user.target is _REMARK]


def _called(node: fx.Node) -> FoundNorm | None:
    name = _name(node)
    given: dict[str, Any] = dict(zip(_CALLED[name], node.args, strict=False)) | node.kwargs
    eps = given.get("eps", _EPS if name == "layer_norm" else None)
    if not _is_number(eps):  # torch has one for each type where an RMSNorm has none
        return None
    return FoundNorm(
        nodes=(node,),
        x=given["input"],
        weight=given.get("weight"),
        bias=given.get("bias"),
        eps=eps,
        centred=name == "layer_norm",
        shape=tuple(given["normalized_shape"]),
    )


def _written_out(node: fx.Node) -> FoundNorm | None:
    for weight, rounded in (node.args, node.args[::-1]):
        value = value_of(weight)
        if value is None or value.dim() != 1:
            continue
        steps = _steps(rounded)
        if steps is None:
            return None
        scaled, root, shifted, mean, square, h = steps
        x: Any = h.args[0] if _name(h) == "to" else h
        kept, given, middle = value_of(x), value_of(rounded), value_of(h)
        if kept is None or given is None or middle is None:
            return None
        eps = argument(shifted, 1, "other")
        fits = middle.dtype == torch.float32 and given.dtype == kept.dtype and _is_number(eps)
        inner = (*((rounded,) if rounded is not scaled else ()), scaled, root, shifted, mean, square)
        whole = (node, *inner, *((h,) if h is not x else ()))
        alone = all(set(part.users) <= {*whole, *remarks_on(part)} for part in whole[1:])
        if not (fits and alone):
            return None
        shape = tuple(kept.shape[-1:])
        return FoundNorm(nodes=whole, x=x, weight=weight, bias=None, eps=eps, centred=False, shape=shape)
    return None


def _steps(rounded: Any) -> tuple[fx.Node, ...] | None:
    """From h * rsqrt(mean(h ** 2) + eps), perhaps converted: product, root, sum, mean, square, h; else None."""
    scaled = rounded.args[0] if _name(rounded) == "to" else rounded
    if _name(scaled) != "mul" or len(scaled.args) != 2:
        return None
    for h, root in (scaled.args, scaled.args[::-1]):
        steps = [root]
        for name, before in (("rsqrt", "add"), ("add", "mean"), ("mean", "pow")):
            if _name(steps[-1]) != name or _name(steps[-1].args[0]) != before:
                break
            steps.append(steps[-1].args[0])
        else:
            _, _, mean, square = steps
            over = argument(mean, 1, "dim"), argument(mean, 2, "keepdim", False)
            if over in ((-1, True), ([-1], True), ((-1,), True)) and tuple(square.args) == (h, 2):
                return scaled, *steps, h
    return None


def _is_number(eps: Any) -> bool:
    """True for a float, and for one of a module that Dynamo traces as free."""
    return isinstance(eps, float) or isinstance(recorded(eps), (float, torch.SymFloat))


def _name(node: Any) -> str:
    called = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    return name_of(node.target) if called else ""
