"""Norms that are written out (mean, rsqrt, product) seen as one operation.

before:  s = rsqrt(mean(square(v)) + eps); y = v * s
after:   y = rms_norm(v)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from acm_compiler.passes.capture.op_names import COPIES, REDUCTIONS, op_set
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
    """What `product` normalises: one operand, the other being one over the size of the same value."""
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
