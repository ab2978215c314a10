"""What a linear is to attention: query, key, value or output projection, told by where its values go."""

from __future__ import annotations

from collections.abc import Iterable

from acm_compiler.passes.dataflow import Dataflow
from acm_compiler.passes.op_names import (
    ACTIVATIONS,
    ATTENTION,
    COPIES,
    MOVES,
    NORMS,
    PRODUCTS,
    RESHAPES,
    SCALES,
    SUMS,
    argument,
    op_set,
)
from acm_compiler.passes.values import Value

_JOINS = op_set("cat stack view_as_complex view_as_real index_put where result complex")
_KEEPS_ROLE = COPIES | RESHAPES | MOVES | SCALES | NORMS | ACTIVATIONS | SUMS | _JOINS
_TO_SOFTMAX = COPIES | RESHAPES | MOVES | SCALES | SUMS | {"tanh", "clamp", "maximum", "where", "cat", "baddbmm"}
_FROM_SOFTMAX = COPIES | RESHAPES | MOVES | SCALES | {"where", "cat"}
_BACK_TO_ATTENTION = COPIES | RESHAPES | MOVES | SCALES | NORMS | SUMS | {"cat", "stack", "result"}


def attention_role(flow: Dataflow, linear: str, *, stop: Iterable[str]) -> str | None:
    """`q`, `k`, `v`, `o`, a packed role such as `qkv`, or None; values in `stop` (the bypass sums) end the walk."""
    roles = _forward_roles(flow, linear, set(stop))
    if roles:
        return "".join(role for role in "qkv" if role in roles)
    return "o" if _reads_attention(flow, linear) else None


def _forward_roles(flow: Dataflow, linear: str, stop: set[str]) -> set[str]:
    roles: set[str] = set()
    todo, seen = [linear], {linear} | stop
    while todo:
        name = todo.pop()
        for user in flow.consumers(name):
            value = flow.values[user]
            if value.op in ATTENTION:
                roles |= _attention_operands(value, name)
            elif _is_data_product(flow, value):
                roles |= _product_roles(flow, value, name)
            elif value.op in _KEEPS_ROLE and user not in seen:
                seen.add(user)
                todo.append(user)
    return roles


def _attention_operands(value: Value, name: str) -> set[str]:
    operands = {"q": argument(value.node, 0, "query"), "k": argument(value.node, 1, "key")}
    operands["v"] = argument(value.node, 2, "value")
    return {role for role, node in operands.items() if node.name == name}


def _is_data_product(flow: Dataflow, value: Value) -> bool:
    return value.op in PRODUCTS and value.name not in flow.linears and len(value.args) >= 2


def _product_roles(flow: Dataflow, value: Value, name: str) -> set[str]:
    """The role of operand `name` in a product of two values, one half of attention written out."""
    operands = list(value.args[-2:])
    if value.op == "rmatmul":
        operands.reverse()
    softmax = _softmax_below(flow, value.name)
    if softmax is not None:
        keys = _key_operand(value, softmax, operands)
        return {"k" if operand == keys else "q" for operand in operands if operand == name}
    weights = [o for o in operands if _softmax_above(flow, o)]
    return {"v"} if weights and name not in weights and name in operands else set()


def _key_operand(scores: Value, softmax: Value, operands: list[str]) -> str:
    """The operand that owns the axis over which softmax normalises; the other holds the queries."""
    rank = len(scores.shape or ())
    dim = argument(softmax.node, 1, "dim", -1)
    axis = (-1 if dim is None else dim) % rank - rank if rank else -1
    if scores.op == "einsum" and isinstance(scores.node.args[0], str):
        terms, _, output = scores.node.args[0].replace(" ", "").replace("...", "").partition("->")
        label = output[axis] if -axis <= len(output) else ""
        return operands[0] if label and label in terms.split(",")[0] else operands[1]
    return operands[0] if axis == -2 else operands[1]


def _softmax_below(flow: Dataflow, name: str) -> Value | None:
    """The softmax that the scores `name` flow into."""
    todo, seen = [name], {name}
    while todo:
        for user in flow.consumers(todo.pop()):
            value = flow.values[user]
            if value.op == "softmax":
                return value
            if value.op in _TO_SOFTMAX and user not in seen:
                seen.add(user)
                todo.append(user)
    return None


def _softmax_above(flow: Dataflow, name: str) -> bool:
    """Whether `name` is attention weights: a softmax, perhaps masked or moved."""
    todo, seen = [name], {name}
    while todo:
        value = flow.values[todo.pop()]
        if value.op == "softmax":
            return True
        if value.op in _FROM_SOFTMAX:
            fresh = [a for a in flow.live_args(value.name) if a not in seen]
            seen.update(fresh)
            todo += fresh
    return False


def _reads_attention(flow: Dataflow, linear: str) -> bool:
    """Whether the linear's input is attention's result, not yet added to the value that went around it."""
    x = flow.linears[linear].x
    todo, seen = [x], {x}
    attended: list[str] = []
    beside: list[str] = []
    while todo:
        value = flow.values[todo.pop()]
        live = flow.live_args(value.name)
        if value.op in ATTENTION:
            attended.append(value.name)
        elif _is_data_product(flow, value):
            if any(_softmax_above(flow, operand) for operand in value.args[-2:]):
                attended.append(value.name)
        elif value.op in _BACK_TO_ATTENTION:
            if value.op in SUMS and len(live) >= 2:
                beside += live
            fresh = [a for a in live if a not in seen]
            seen.update(fresh)
            todo += fresh
    # in a residual sum one operand feeds the attention whose result is the other
    return any(not any(o != name and flow.feeds(o, name) for o in beside) for name in attended)
