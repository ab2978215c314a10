"""Roles of linears in attention: query, key, value or output projection, told by where their values go."""

from __future__ import annotations

import math
from collections.abc import Iterable

from acm_compiler.passes.capture.op_names import (
    ACTIVATIONS,
    ATTENTION,
    COPIES,
    MOVES,
    NORMS,
    PACKING,
    PRODUCTS,
    RESHAPES,
    SCALES,
    SUMS,
    argument,
    op_name,
    op_set,
)
from acm_compiler.passes.find.channels import channels_of
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.values import Value

_MOVED = COPIES | RESHAPES | MOVES | SCALES
_WRITES = op_set("setitem copy overwritten index_put")
_JOINS = op_set("cat stack view_as_complex view_as_real where result complex") | _WRITES
# pooled queries and keys: `max_pool3d(q(x))`; windows that overlap: `unfold(v(x))`
_POOLS = op_set("max amax mean max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d")
_FOLDS = op_set("fold im2col col2im")
_KEEPS_ROLE = _MOVED | NORMS | ACTIVATIONS | SUMS | _JOINS | _POOLS | _FOLDS
# capped scores: `30 * tanh(q @ k.mT / 30)`
_CAPS = op_set("tanh clamp maximum max where")
_TO_SOFTMAX = _MOVED | SUMS | _CAPS | _WRITES | {"cat", "baddbmm"}
_FROM_SOFTMAX = _MOVED | NORMS | _WRITES | {"where", "cat"}
_BACK_TO_ATTENTION = _MOVED | NORMS | SUMS | ACTIVATIONS | _FOLDS | _WRITES | {"stack", "result"}
_TO_ANOTHER_LAYER = COPIES | RESHAPES | MOVES | NORMS | ACTIVATIONS | {"result", "cat"}


def attention_role(flow: Dataflow, linear: str, *, stop: Iterable[str]) -> str | None:
    """`q`, `k`, `v`, `o`, a packed role such as `qkv`, or None; values in `stop` (the bypass sums) end the walk."""
    roles = _forward_roles(flow, linear, set(stop))
    if roles:
        return "".join(role for role in "qkv" if role in roles)
    return "o" if _reads_attention(flow, flow.linears[linear].x) else None


def other_layer(flow: Dataflow, linear: str, *, stop: Iterable[str]) -> str | None:
    """The linear that reads a part of what the projection `linear` gives, where that part goes to no attention."""
    # `q, k, v, up = w(x).split(sizes, -1)`, with up read by `down(gelu(up))`
    packing = COPIES | RESHAPES | PACKING | {"result"}
    for _, part in flow.readers(linear, lambda value: value.op in packing):
        shown = channels_of(flow, part.name) if part.op in packing else None
        if shown is None or shown.size == flow.linears[linear].d_out or _forward_roles(flow, part.name, set(stop)):
            continue
        reader = _next_linear(flow, part.name)
        if reader is not None:
            return reader
    return None


def attends_projections(flow: Dataflow, x: str) -> bool:
    """True if `x` is made, with no linear between, of one that gives queries, or values that are not the keys, too."""
    todo, seen = [x], {x}
    while todo:
        for name in set(flow.live_args(todo.pop())) - seen:
            seen.add(name)
            if name not in flow.linears:
                todo.append(name)
            elif (roles := _forward_roles(flow, name, set())) == {"v"} or "q" in roles:
                return True
    return False


def _next_linear(flow: Dataflow, name: str) -> str | None:
    """A linear that the value flows into through operations on it alone."""

    def alone(value: Value) -> bool:
        passed = value.op in _TO_ANOTHER_LAYER | SUMS | SCALES
        return passed and (value.op == "cat" or len(flow.live_args(value.name)) == 1)

    return next((value.name for _, value in flow.readers(name, alone) if value.op == "linear"), None)


def _forward_roles(flow: Dataflow, linear: str, stop: set[str]) -> set[str]:
    # fused:        `scaled_dot_product_attention(q, k, v)`
    # written out:  `(q @ k.mT).softmax(-1) @ v`
    # linear:       `q.softmax(-1) @ (k.softmax(-2).mT @ v)`
    def through(value: Value) -> bool:
        return value.op in _KEEPS_ROLE and not _goes_around(flow, linear, value)

    roles: set[str] = set()
    for name, value in flow.readers(linear, through, stop=stop):
        if value.op in ATTENTION or _is_data_product(flow, value):
            roles |= operand_roles(flow, value, name)
        elif value.op == "softmax" and not _joined(flow, value.name, linear):
            roles |= _roles_without_scores(flow, value.name)
    return roles


def _goes_around(flow: Dataflow, linear: str, value: Value) -> bool:
    """True at a sum with what another linear made of `linear`'s output: that goes around a layer, and is no operand."""
    # `x = embed(patches); x = x + mlp(x); scores(x).softmax(-1).mT @ x`: embed gives what is pooled, but no values
    between = (other for other in flow.linears if other != linear and flow.feeds(linear, other))
    return value.op in SUMS and any(flow.feeds(other, part) for other in between for part in flow.live_args(value.name))


def operand_roles(flow: Dataflow, value: Value, name: str) -> set[str]:
    """The roles, q, k or v, of operand `name` of an attention or of a product of two values."""
    if value.op not in ATTENTION:
        return _product_roles(flow, value, name)
    operands = {"q": argument(value.node, 0, "query"), "k": argument(value.node, 1, "key")}
    operands["v"] = argument(value.node, 2, "value")
    return {role for role, node in operands.items() if node.name == name}


def _is_data_product(flow: Dataflow, value: Value) -> bool:
    return value.op in PRODUCTS and value.name not in flow.linears and len(value.args) >= 2


def _product_roles(flow: Dataflow, value: Value, name: str) -> set[str]:
    """The role of operand `name` in a product of two values, one half of attention written out."""
    operands = list(value.args[-2:])
    # scores, `q @ k.mT`: a softmax reads the product
    softmax = _softmax_below(flow, value.name)
    if softmax is not None:
        keys = _key_operand(value, softmax, operands)
        return {"k" if operand == keys else "q" for operand in operands if operand == name}
    # `q @ context`, the context being `k.softmax(-2).mT @ v`; then `scores.softmax(-1) @ v`
    others = [o for o in operands if o != name] if name in operands else []
    if any(_is_attended(flow, o) for o in others):
        return {"q"}
    weighed = not _softmax_above(flow, name) and any(_softmax_above(flow, o) for o in others)
    return {"v"} if weighed else set()


def _roles_without_scores(flow: Dataflow, softmax: str) -> set[str]:
    """Roles of a value that is softmaxed itself: softmax(k) times v is the context that q is multiplied by."""
    roles: set[str] = set()
    for name, value in flow.readers(softmax, lambda value: value.op in _FROM_SOFTMAX):
        if _is_data_product(flow, value):
            if any(_is_attended(flow, o) for o in value.args[-2:] if o != name):
                roles.add("q")
            elif _meets_product(flow, value.name):
                roles.add("k")
    return roles


def _joined(flow: Dataflow, softmax: str, linear: str) -> bool:
    """True if something else was added on the way to `softmax`, as a bias is to scores."""
    # `(q @ k.mT + bias(x)).softmax(-1)`: bias(x) reaches the softmax and is no query
    name = softmax
    while name != linear and len(live := flow.live_args(name)) == 1:
        name = live[0]
    return name != linear


def _meets_product(flow: Dataflow, name: str) -> bool:
    """True if `name`, perhaps moved or scaled, is multiplied by another value: as a context is, by q."""
    return any(_is_data_product(flow, value) for _, value in flow.readers(name, lambda value: value.op in _MOVED))


def _is_attended(flow: Dataflow, name: str) -> bool:
    """True if `name` is, perhaps moved or scaled, a product of values with weights from a softmax."""
    value = flow.values[flow.behind(name, _MOVED)]
    return _is_data_product(flow, value) and any(_softmax_above(flow, operand) for operand in value.args[-2:])


def _key_operand(scores: Value, softmax: Value, operands: list[str]) -> str:
    """The operand that owns the axis over which softmax normalises; the other holds the queries."""
    # `(q @ k.mT).softmax(-1)`: the right operand; `(k @ q.mT).softmax(-2)`: the left one
    rank = len(scores.shape or ())
    dim = argument(softmax.node, 1, "dim", -1) if op_name(softmax.node) == "softmax" else -1  # as written out
    axis = (-1 if dim is None else dim) % rank - rank if rank else -1
    if scores.op == "einsum" and isinstance(scores.node.args[0], str):
        terms, _, output = scores.node.args[0].replace(" ", "").replace("...", "").partition("->")
        label = output[axis] if -axis <= len(output) else ""
        return operands[0] if label and label in terms.split(",")[0] else operands[1]
    return operands[0] if axis == -2 else operands[1]


def _softmax_below(flow: Dataflow, name: str) -> Value | None:
    """The softmax that the scores `name` flow into."""
    readers = flow.readers(name, lambda value: value.op in _TO_SOFTMAX or _mixes_heads(flow, value))
    return next((value for _, value in readers if value.op == "softmax"), None)


def _softmax_above(flow: Dataflow, name: str) -> bool:
    """True if `name` is attention weights: a softmax, perhaps masked or moved, or a sum of such."""
    # each value is looked at once: what a loop writes row by row, `w[i] = w[i] + f(w[:i])`, has paths without number
    known: dict[str, bool] = {}
    todo = [name]
    while todo:
        value = flow.values[todo[-1]]
        passes = value.op in SUMS or value.op in _FROM_SOFTMAX or _mixes_heads(flow, value)
        live = flow.live_args(value.name) if passes else []
        fresh = [arg for arg in live if arg not in known]
        if not fresh:
            those = [known[arg] for arg in live]
            summed = value.op in SUMS and bool(those) and all(those)
            known[todo.pop()] = value.op == "softmax" or summed or (value.op not in SUMS and any(those))
        todo += fresh
    return known[name]


def _mixes_heads(flow: Dataflow, value: Value) -> bool:
    """True if the linear `value` mixes the heads of scores: [batch, queries, keys, heads] to the same."""
    # `mix(scores.permute(0, 2, 3, 1))`, before or after the softmax
    linear = flow.linears.get(value.name)
    return linear is not None and len(value.shape or ()) >= 4 and linear.d_in == linear.d_out


def _reads_attention(flow: Dataflow, x: str) -> bool:
    """True if `x` is attention's result, not yet added to the value that went around it."""
    # `o(norm(attend(q, k, v)).flatten(2))` and `o(q + attend(q, k, v))`, with pooled q: yes
    # `up(x + attend(q(x), k(x), v(x)))`: no, x went around
    todo, seen = [x], {x}
    attended: list[str] = []
    beside: list[str] = []
    while todo:
        value = flow.values[todo.pop()]
        live = flow.live_args(value.name)
        if value.op in ATTENTION:
            attended.append(value.name)
        elif value.op == "cat":
            if all(_reads_attention(flow, arg) for arg in live):
                attended.append(value.name)
        elif _is_data_product(flow, value):
            if any(_softmax_above(flow, o) or _is_attended(flow, o) for o in value.args[-2:]):
                attended.append(value.name)
        elif value.op in _BACK_TO_ATTENTION or _averages_one(flow, value):
            if value.op in SUMS and len(live) >= 2:
                beside += live
            fresh = [a for a in live if a not in seen]
            seen.update(fresh)
            todo += fresh
    # in a residual sum one operand feeds the attention whose result is the other, through projections
    around = [o for o in beside if _forward_roles(flow, o, set()) != {"q"}]
    return any(not any(o != name and flow.feeds(o, name) for o in around) for name in attended)


def _averages_one(flow: Dataflow, value: Value) -> bool:
    """True if `value` is a mean over axes of length one."""
    source = flow.values[value.args[0]].shape if value.op == "mean" else None
    return source is not None and math.prod(source) == math.prod(value.shape or ())
