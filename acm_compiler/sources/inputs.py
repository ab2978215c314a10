"""Calls of a model: its inputs (a tensor, a tuple of arguments, a mapping of keyword arguments) and its mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from acm_compiler.errors import UsageError


class ForwardEnded(BaseException):
    """Ends a forward at the last call that is of interest; a model's own `except Exception` lets it through."""


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


def refuse_labels(inputs: Inputs, *, planned: str) -> None:
    """Refuse a batch that passes what looks like labels as one more argument of the model. UsageError.

    planned: the shapes of the plan's example inputs, by commas. Labels are a tensor with one number per example, beyond
    as many arguments as the example had.
    """
    args, _ = split_inputs(inputs)
    known = len(planned.split(", "))
    batch = next((len(arg) for arg in args if isinstance(arg, Tensor) and arg.dim()), None)
    for place, arg in enumerate(args[known:], start=known + 1):
        if isinstance(arg, Tensor) and tuple(arg.shape) in ((batch,), (batch, 1)):
            raise UsageError(
                "a batch holds what looks like labels, which would go to the model as one more argument",
                found=f"argument {place} of {len(args)}: {str(arg.dtype).removeprefix('torch.')} {list(arg.shape)}",
                expected=f"what the plan's example had: {planned}",
                fix="leave labels out: (x for x, label in loader); or name what the model takes: {'x': x, 'other': y}",
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


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the model is in train or eval mode; every module's own mode comes back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, mode in before:
            module.training = mode
