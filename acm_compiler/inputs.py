"""How a model's inputs are written down: a tensor, a tuple of arguments, or a mapping of keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from acm_compiler.errors import UsageError

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def split_inputs(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of the call that `inputs` stand for."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise UsageError(
        "inputs of a kind that cannot be passed to a model",
        found=type(inputs).__name__,
        expected="a tensor, a tuple of arguments, or a mapping of keyword arguments",
    )


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for `inputs`."""
    args, kwargs = split_inputs(inputs)
    return model(*args, **kwargs)


def by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The same call of `module`, its positional arguments under the names that its forward gives them.

    What goes to a *args stays positional, and so does all of a call that the forward cannot take.
    """
    if not args:
        return args, kwargs
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    rest: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            rest = value
        else:
            named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return rest, named
