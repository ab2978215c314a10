"""Written-out norms and softmaxes, seen as one operation each.

before:  s = rsqrt(mean(square(v)) + eps); y = v * s
after:   y = rms_norm(v)

before:  p = exp(s - logsumexp(s))     or     e = exp(s); p = e / sum(e)
after:   p = softmax(s)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from acm_compiler.passes.capture.op_names import COPIES, REDUCTIONS, argument, op_set
from acm_compiler.passes.find.values import Value

_INVERSE_ROOTS = op_set("rsqrt sqrt reciprocal pow add clamp clamp_min rdiv maximum") | COPIES
_POWERS = op_set("pow square mul abs sub") | COPIES
_LIMIT = 12  # operations between a product and what it normalises; real ones have at most 8


def fold_norms(values: Mapping[str, Value]) -> dict[str, Value]:
    """The values that change: each product that closes a written-out norm becomes `rms_norm` of its input."""
    folded = {}
    for value in values.values():
        if value.op in ("mul", "div") and value.live and len(value.args) == 2:
            source = _normalised(value, values)
            if source is not None:
                folded[value.name] = dataclasses.replace(value, op="rms_norm", args=(source,))
    return folded


def _normalised(product: Value, values: Mapping[str, Value]) -> str | None:
    """The value that `product` normalises: one operand, the other being one over the size of the same value."""
    for numerator, scale in (product.args, product.args[::-1]):
        source = _centred(numerator, values)
        if source is not None and source in _measured(scale, values):
            return source
        if product.op == "div":
            return None
    return None


def _through_copies(name: str, values: Mapping[str, Value]) -> str:
    while values[name].op in COPIES and values[name].args:
        name = values[name].args[0]
    return name


def _centred(name: str, values: Mapping[str, Value]) -> str:
    """`v` for `v` and for `v - mean(v)`, copies looked through."""
    name = _through_copies(name, values)
    value = values[name]
    if value.op == "sub" and len(value.args) == 2:
        left, right = (_through_copies(a, values) for a in value.args)
        if values[right].op in REDUCTIONS and left == _through_copies(values[right].args[0], values):
            return left
    return name


def _measured(name: str, values: Mapping[str, Value]) -> set[str]:
    """The values whose size `name` is made from; empty when it is no inverse root of a reduction."""
    for _ in range(_LIMIT):
        value = values[name]
        if value.op in REDUCTIONS and value.args:
            return _under_powers(value.args[0], values)
        if value.op == "result" and values[value.args[0]].op in REDUCTIONS:
            name = value.args[0]
            continue
        live = [a for a in value.args if values[a].live]
        if value.op not in _INVERSE_ROOTS or len(live) != 1:
            return set()
        name = live[0]
    return set()


def _under_powers(name: str, values: Mapping[str, Value]) -> set[str]:
    """Every value met on the way down from a reduction through squares and centring."""
    found: set[str] = set()
    for _ in range(_LIMIT):
        name = _through_copies(name, values)
        found |= {name, _centred(name, values)}
        value = values[name]
        live = {a for a in value.args if values[a].live}
        if value.op not in _POWERS or len(live) != 1:
            return found
        name = live.pop()
    return found


def fold_softmax(values: Mapping[str, Value]) -> dict[str, Value]:
    """The values that change: each one that closes a written-out softmax becomes `softmax` of its scores."""
    folded = {}
    for value in values.values():
        scores = _scores(value, values) if value.live else None
        if scores is not None:
            folded[value.name] = dataclasses.replace(value, op="softmax", args=(scores,))
    return folded


def _scores(value: Value, values: Mapping[str, Value]) -> str | None:
    """The value that `value` is the softmax of, if it is one."""
    if value.op == "exp":
        shifted = values[value.args[0]]
        if shifted.op == "sub" and _reduces("logsumexp", shifted, values):
            return shifted.args[0]
    if value.op == "div" and _reduces("sum", value, values) and values[value.args[0]].op == "exp":
        return values[value.args[0]].args[0]
    return None


def _reduces(op: str, value: Value, values: Mapping[str, Value]) -> bool:
    """True if the second operand of `value` is `op` of the first one over the last axis."""
    if len(value.args) != 2:
        return False
    total = values[value.args[1]]
    axis = argument(total.node, 1, "dim")
    axes = axis if isinstance(axis, (list, tuple)) else (axis,)
    rank = len(values[value.args[0]].shape or ())
    return total.op == op and total.args[:1] == value.args[:1] and tuple(axes) in ((-1,), (rank - 1,))
