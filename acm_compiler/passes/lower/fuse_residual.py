"""The bypass around an ACM becomes part of its operator.

before:  y = learners(x, k, ...); out = res + reshape(y)
after:   out = reshape(learners(x, k, ..., residual=reshape(res)))

The kernel then starts its sums from the residual, and the sum is never a pass over memory of its own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from acm_compiler.passes.lower.acm_nodes import (
    LEARNERS,
    call_of,
    is_idle_dropout,
    is_reshape,
    keeps_apart,
    learners_nodes,
    only_user,
    put_reshape,
    value_of,
    with_value,
)

_ADDS: tuple[Any, ...] = (operator.add, torch.add, torch.ops.aten.add.Tensor)


def fuse_residual(graph: fx.Graph) -> int:
    """Fuse what can be fused, in place; how many ACMs got their residual."""
    return sum(_fuse(node) for node in learners_nodes(graph))


def _fuse(learners: fx.Node) -> bool:
    if call_of(learners).residual is not None:
        return False
    chain = _chain(learners)
    last = chain[-1]
    add = only_user(last)
    if add is None or not _is_plain_add(add) or keeps_apart(learners, add):
        return False
    other = next((arg for arg in add.args if arg is not last), None)
    if not _same_kind(value_of(other), value_of(last)):
        return False
    assert isinstance(other, fx.Node)
    _rebuild(learners, chain, add, other)
    return True


def _chain(learners: fx.Node) -> list[fx.Node]:
    """The operator and what only reshapes its result (or is a dropout that does nothing), each read once."""
    chain = [learners]
    while (
        (user := only_user(chain[-1])) is not None
        and user.args[0] is chain[-1]
        and (is_reshape(user) or is_idle_dropout(user))
    ):
        chain.append(user)
    return chain


def _is_plain_add(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "add" and not node.kwargs
    return node.target in _ADDS and not node.kwargs and len(node.args) == 2


def _same_kind(a: Tensor | None, b: Tensor | None) -> bool:
    """True if adding them neither broadcasts nor converts."""
    if a is None or b is None or a.dtype != b.dtype or a.dim() != b.dim() or a.device != b.device:
        return False
    return bool(statically_known_true(sym_eq(a.shape, b.shape)))


def _rebuild(learners: fx.Node, chain: list[fx.Node], add: fx.Node, other: fx.Node) -> None:
    """Put the operator where the sum was: there everything that it reads is known already."""
    graph, value = learners.graph, value_of(learners)
    assert value is not None
    with graph.inserting_before(add):
        rows = put_reshape(other, (-1, value.shape[1]))
        call = call_of(learners)._replace(residual=rows)
        fused = graph.call_function(LEARNERS[0], tuple(call), dict(learners.kwargs))
        copies: dict[fx.Node, fx.Node] = {learners: fused}
        for node in chain[1:]:
            copies[node] = graph.node_copy(node, lambda old: copies.get(old, old))
    rows.meta = with_value(other.meta, value)
    fused.meta = {**learners.meta}
    add.replace_all_uses_with(copies[chain[-1]])
    for node in (add, *reversed(chain)):
        graph.erase_node(node)
