"""Tells whether a site's output is only ever added to a value that goes around the site.

Then a token may run no learner at all (k = 0): what the site would have changed is kept by the bypass.
Dominators cannot tell this: encoder-decoders, parallel branches and merged gates have other shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from acm_compiler.passes.capture.op_names import COPIES, MOVES, NORMS, RESHAPES, SCALES, SUMS, op_set
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.linears import scales_only
from acm_compiler.passes.find.values import Value

_REORDERS = op_set("roll flip gather take_along_dim index index_select unfold as_strided")
_KEEPS_ZERO = COPIES | RESHAPES | MOVES | op_set("mul neg masked_fill result cat stack sum mean")
_BYPASSES = COPIES | RESHAPES | (MOVES - _REORDERS) | SCALES | NORMS | {"result", "cat"}
_SELECTS = op_set("getitem slice narrow select")
_SEARCH_LIMIT = 64  # values looked at on the other side of one sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Bypass:
    """`found`: every use of the output meets a bypass. `norm`: a norm lies between. `sums`: where they meet."""

    found: bool
    norm: bool
    sums: frozenset[str]


def find_bypass(flow: Dataflow, x: str, output: str) -> Bypass:
    """Follows `output` of the site that reads `x` through operations that keep zero at zero to the sums.

    A sum is a bypass where its other operand, opened as a tree of sums, holds a value of the same size that `x`
    is computed from, or the same tokens of a longer one. A sum with something else (a parallel branch, a bias)
    is passed.
    """
    # `x + gamma * f(norm(x))`: found; `norm(x + f(x))`: found; `x + norm(f(x))`: found, with a norm between
    # `x + (f(z) + g(z))`: the sum with g(z) is passed, the sum with x is the bypass
    # `sigmoid(f(x)) + x`: not found, since f(x) = 0 would not leave x as it is
    sums: set[str] = set()
    after_norm: dict[str, bool] = {output: False}
    todo, found, norm, free = [output], False, False, False
    while todo:
        name = todo.pop()
        free |= name in flow.outputs
        for user in flow.consumers(name):
            value = flow.values[user]
            if _is_bypass_sum(flow, value, name, x):
                found, norm = True, norm or after_norm[name]
                sums.add(user)
            elif _keeps_zero(flow, value, name):
                normed = after_norm[name] or value.op in NORMS
                if user not in after_norm or (normed and not after_norm[user]):
                    after_norm[user] = normed
                    todo.append(user)
            else:
                free = True
    return Bypass(found=found and not free, norm=found and not free and norm, sums=frozenset(sums))


def _is_bypass_sum(flow: Dataflow, value: Value, name: str, x: str) -> bool:
    operands = list(value.args)
    if value.op == "addcmul" or value.op == "lerp":  # a + b * c: only a goes around
        operands = operands[:1] if value.args[0] != name else []
    elif value.op not in SUMS:
        return False
    shape = value.shape
    others = [o for o in operands if o != name and flow.values[o].shape == shape]
    if shape is None or flow.values[name].shape != shape:
        return False
    return any(_holds_bypass(flow, o, x) if flow.values[o].live else _asks(flow, o, x) for o in others)


def _asks(flow: Dataflow, learned: str, x: str) -> bool:
    """True if attention's queries for `x` are made from the value `learned`, which depends on no input."""
    # `latents + o(attend(q(latents), k(x), v(x)))`: the site reads x, what goes around it are the latents
    queries = (name for name in flow.linears if not flow.values[name].live)
    return any(flow.feeds(learned, name) and flow.feeds(name, x) for name in queries)


def _holds_bypass(flow: Dataflow, other: str, x: str) -> bool:
    """True if a leaf of the sum tree `other` is `x` or something x is computed from, of the same size."""
    # `(a + b) + f(norm(a + b))`: the other operand is a sum itself; `x[:, :1] + f(x)[:, :1]`: the same tokens of x
    todo, seen = [(other, math.prod(flow.values[other].shape or ()))], {other}
    while todo and len(seen) < _SEARCH_LIMIT:
        name, size = todo.pop(0)
        value = flow.values[name]
        same_size = value.shape is not None and math.prod(value.shape) == size
        if same_size and any(flow.feeds(twin, x) for twin in _computed_alike(flow, value)):
            return True
        live = list(dict.fromkeys(flow.live_args(name)))  # a value joined with itself is one
        if _selects_tokens(flow, value):
            size = math.prod(flow.values[live[0]].shape or ())
        if value.op in SUMS or (value.op in _BYPASSES and len(live) == 1):
            todo += [(a, size) for a in live if a not in seen]
            seen.update(live)
    return False


def _computed_alike(flow: Dataflow, value: Value) -> list[str]:
    """The value and those that join the same values in the same way: a block may do so once for each use."""
    # `cat([x, skip]) + f(cat([x, skip]))`: two nodes, one value
    if value.op != "cat":
        return [value.name]
    users = (flow.values[user] for user in flow.consumers(value.args[0]))
    return [user.name for user in users if user.op == "cat" and user.args == value.args and user.shape == value.shape]


def _selects_tokens(flow: Dataflow, value: Value) -> bool:
    """True if `value` is some of the tokens of another value, each whole."""
    live = flow.live_args(value.name)
    if value.op not in _SELECTS or len(live) != 1:
        return False
    source = flow.values[live[0]].shape
    return bool(value.shape and source and value.shape[-1] == source[-1])


def _keeps_zero(flow: Dataflow, value: Value, name: str) -> bool:
    """True if `value` is zero (or holds nothing of the site) where `name` is."""
    if value.op in NORMS | {"addcmul", "lerp"} | SUMS | _KEEPS_ZERO:
        return value.op != "lerp" or value.args[0] != name
    if value.op == "div":
        return value.args[0] == name
    if value.op == "einsum":
        return scales_only(value.node)
    if value.op == "where":
        return all(a == name or not flow.values[a].live for a in value.args[1:])
    return False
