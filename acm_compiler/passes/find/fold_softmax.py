"""Softmax over the last axis that is written out seen as one operation.

before:  p = exp(s - logsumexp(s))     or     e = exp(s); p = e / sum(e)
after:   p = softmax(s)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from acm_compiler.passes.capture.op_names import argument
from acm_compiler.passes.find.values import Value


def fold_softmax(values: Mapping[str, Value]) -> dict[str, Value]:
    """The values that change: each one that closes a written-out softmax becomes `softmax` of its scores."""
    folded = {}
    for value in values.values():
        scores = _scores(value, values) if value.live else None
        if scores is not None:
            folded[value.name] = dataclasses.replace(value, op="softmax", args=(scores,))
    return folded


def _scores(value: Value, values: Mapping[str, Value]) -> str | None:
    """What `value` is the softmax of, if it is one."""
    if value.op == "exp":
        shifted = values[value.args[0]]
        if shifted.op == "sub" and _reduces("logsumexp", shifted, values):
            return shifted.args[0]
    if value.op == "div" and _reduces("sum", value, values) and values[value.args[0]].op == "exp":
        return values[value.args[0]].args[0]
    return None


def _reduces(op: str, value: Value, values: Mapping[str, Value]) -> bool:
    """Whether the second operand of `value` is `op` of the first one over the last axis."""
    if len(value.args) != 2:
        return False
    total = values[value.args[1]]
    axis = argument(total.node, 1, "dim")
    axes = axis if isinstance(axis, (list, tuple)) else (axis,)
    rank = len(values[value.args[0]].shape or ())
    return total.op == op and total.args[:1] == value.args[:1] and tuple(axes) in ((-1,), (rank - 1,))
