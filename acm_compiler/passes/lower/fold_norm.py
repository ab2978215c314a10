"""The LayerNorm or RMSNorm in front of an ACM becomes part of its operator, where nothing is differentiated.

before:  z = layer_norm(x, (D,), w, b, eps); y = gated_learners(reshape(z), *w_gate, ..., residual)
after:   y = gated_learners(reshape(x), *w_gate, ..., residual, w, b, norm_eps=eps)

The normalised tokens are then never written as a tensor of their own: kernels normalise rows where they first read
them. Only where nothing else reads the norm, as in front of an MLP of a pre-norm block, and only on CPUs: on GPUs
Inductor's kernel that adds the bypass before it normalises in the same time. Norms are torch's own operators, and
RMSNorm as transformers writes it out:

h = x.to(float32); z = weight * (h * rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from acm_compiler.passes.capture.op_names import argument, name_of
from acm_compiler.passes.lower.acm_nodes import (
    GATED,
    NORM_CENTRED,
    NORM_EPS,
    acm_nodes,
    call_of,
    is_reshape,
    keeps_apart,
    only_user,
    recorded,
    value_of,
)

_COPYING: dict[Any, Any] = {"view": "reshape", torch.ops.aten.view.default: torch.ops.aten.reshape.default}
_CALLED = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
_EPS = 1e-5  # torch's of a LayerNorm, where a call leaves it out
_REMARK = torch.ops.aten._assert_tensor_metadata.default  # what torch.export notes of a tensor


def fold_norm(graph: fx.Graph) -> int:
    """Fold in place; how many ACMs took the norm in front of them."""
    return sum(_fold(node) for node in acm_nodes(graph) if node.target in GATED)


def _fold(acm: fx.Node) -> bool:
    chain = _chain(acm)
    norm = norm_at(chain[-1]) if chain and acm.kwargs.get(NORM_EPS) is None else None
    if norm is None or not _is_over_features(chain, norm) or not _has_room(acm):
        return False
    if keeps_apart(norm.nodes[-1], acm):
        return False
    for node in chain[:-1]:
        node.target = _COPYING.get(node.target, node.target)  # x may lie as no result of a norm does
        node.replace_input_with(norm.nodes[0], norm.x)
    tokens = norm.x if len(chain) == 1 else chain[0]
    acm.args = tuple(call_of(acm)._replace(x=tokens, norm_weight=norm.weight, norm_bias=norm.bias))
    acm.kwargs = {**acm.kwargs, NORM_EPS: norm.eps} | ({} if norm.centred else {NORM_CENTRED: False})
    for node in norm.nodes:
        for part in (*remarks_on(node), node):
            acm.graph.erase_node(part)
    return True


def _chain(acm: fx.Node) -> list[fx.Node]:
    """From the ACM's tokens up through what only reshapes them, empty where something else reads."""
    chain = [call_of(acm).x]
    reader = acm
    while only_user(chain[-1]) is reader and is_reshape(chain[-1]):
        reader = chain[-1]
        chain.append(reader.args[0])
    return chain if only_user(chain[-1]) is reader else []


def _is_over_features(chain: list[fx.Node], norm: FoundNorm) -> bool:
    """True if the features of each token are normalised, on a CPU, and nothing is converted on the way."""
    value, shape = value_of(norm.x), norm.shape
    if value is None or value.device.type != "cpu" or len(shape) != 1:
        return False
    rows = [value, *(value_of(node) for node in chain)]
    others = [value_of(weight) for weight in (norm.weight, norm.bias) if weight is not None]
    fit = (value.dtype, value.device, shape[0])
    return all(t is not None and (t.dtype, t.device, t.shape[-1]) == fit for t in (*rows, *others))


def _has_room(acm: fx.Node) -> bool:
    """True if normalised rows are no longer than those of the dense hidden layer (the output, where there is none)."""
    call = call_of(acm)
    x, w_in, b_out = (value_of(node) for node in (call.x, call.w_in, call.b_out))
    if x is None or w_in is None or b_out is None:
        return False
    hidden = w_in.shape[0] * w_in.shape[1] if acm.kwargs["form"] in ("mlp", "gated") else b_out.shape[1]
    return bool(x.shape[1] <= hidden)


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
