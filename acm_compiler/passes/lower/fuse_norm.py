"""The LayerNorm or RMSNorm in front of an ACM becomes part of its operator, where nothing is differentiated.

before:  z = layer_norm(x, (D,), w, b, eps); y = gated_learners(reshape(z), *w_gate, ..., residual)
after:   y = gated_learners(reshape(x), *w_gate, ..., residual, w, b, norm_eps=eps)

The normalised tokens are then never written as a tensor of their own: kernels normalise rows where they first read
them. Only where nothing else reads the norm, as in front of an MLP of a pre-norm block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from acm_compiler.passes.lower.acm_nodes import (
    GATED,
    NORM_CENTRED,
    NORM_EPS,
    acm_nodes,
    call_of,
    is_reshape,
    keeps_apart,
    only_user,
    value_of,
)
from acm_compiler.passes.lower.norms import FoundNorm, norm_at, remarks_on

_COPYING: dict[Any, Any] = {"view": "reshape", torch.ops.aten.view.default: torch.ops.aten.reshape.default}


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
    """True if the features of each token are normalised, and nothing is converted on the way."""
    value, shape = value_of(norm.x), norm.shape
    if value is None or len(shape) != 1:
        return False
    rows = [value, *(value_of(node) for node in chain)]
    others = [value_of(weight) for weight in (norm.weight, norm.bias) if weight is not None]
    return all(_fits(other, value) and other is not None and other.shape[-1] == shape[0] for other in (*rows, *others))


def _fits(other: Tensor | None, value: Tensor) -> bool:
    return other is not None and other.dtype == value.dtype and other.device == value.device


def _has_room(acm: fx.Node) -> bool:
    """True if normalised rows are no longer than those of the dense hidden layer (the output, where there is none)."""
    call = call_of(acm)
    x, w_in, b_out = (value_of(node) for node in (call.x, call.w_in, call.b_out))
    if x is None or w_in is None or b_out is None:
        return False
    hidden = w_in.shape[0] * w_in.shape[1] if acm.kwargs["form"] in ("mlp", "gated") else b_out.shape[1]
    return bool(x.shape[1] <= hidden)
