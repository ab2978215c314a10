"""Tensors of the operators by name: schemas, operand checks, rules, graph passes and kernels read their order here.

Operators take them flat: `named` reads a call's positional arguments, `flat` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from torch import Tensor


class GateWeights(NamedTuple):
    """A gate's two linears: w_inner [G, D], b_inner [G], w_outer [C, G], b_outer [C]."""

    w_inner: Tensor
    b_inner: Tensor
    w_outer: Tensor
    b_outer: Tensor


class GateChoices(NamedTuple):
    """What a gate follows at run time, scalars: the price of a MAC (float32 or its bits) and the bounds of k."""

    knob: Tensor
    k_lo: Tensor
    k_hi: Tensor


class LearnerWeights(NamedTuple):
    """The tensors of `reference.Weights`, in its order; shapes there."""

    w_in: Tensor
    b_in: Tensor | None
    w_up: Tensor | None
    b_up: Tensor | None
    w_out: Tensor | None
    b_out: Tensor
    w_top: Tensor | None


class GateArguments(NamedTuple):
    """`acm::gate`: x [T, D]."""

    x: Tensor
    gate: GateWeights
    choices: GateChoices


class LearnersArguments(NamedTuple):
    """`acm::learners`: x [T, D], k [T], residual [T, O]."""

    x: Tensor
    k: Tensor
    weights: LearnerWeights
    residual: Tensor | None = None


class GatedArguments(NamedTuple):
    """`acm::gated_learners`: x [T, D], residual [T, O], weight and bias [D] of the norm in front."""

    x: Tensor
    gate: GateWeights
    choices: GateChoices
    weights: LearnerWeights
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


Arguments = TypeVar("Arguments", GateArguments, LearnersArguments, GatedArguments)


def named(kind: type[Arguments], arguments: Sequence[Any]) -> Arguments:
    """A call from the operator's positional arguments; missing ones have their defaults."""
    make: Any = kind  # mypy takes no class of tuples for hashable
    given = len(arguments)
    return make(*(part(*arguments[at]) if part else arguments[at] for at, part in _places(make) if part or at < given))


def flat(call: GateArguments | LearnersArguments | GatedArguments) -> tuple[Any, ...]:
    """The positional arguments of a call, without defaults at its end."""
    parts: list[Any] = list(call)
    while call._fields[len(parts) - 1] in call._field_defaults and parts[-1] is None:
        parts.pop()
    return tuple(value for part in parts for value in (part if isinstance(part, tuple) else (part,)))


def schema(kind: type) -> str:
    """The positional arguments as an operator's schema declares them."""
    return ", ".join(_declarations(kind))


def _declarations(kind: Any) -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        if hasattr(hint, "_fields"):
            yield from _declarations(hint)
        else:
            optional = "?" if type(None) in get_args(hint) else ""
            yield f"Tensor{optional} {name}{'=None' * (name in kind._field_defaults)}"


@cache
def _places(kind: Any) -> list[tuple[Any, Any]]:
    """For each field its place among the flat arguments, or its slice and the tuple made of it."""
    places: list[tuple[Any, Any]] = []
    start = 0
    for hint in get_type_hints(kind).values():
        size = len(getattr(hint, "_fields", "x"))
        places.append((slice(start, start + size), hint) if hasattr(hint, "_fields") else (start, None))
        start += size
    return places
