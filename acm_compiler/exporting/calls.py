"""The call that is exported: example inputs with the model's names for them, axes of any length, plain outputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acm_compiler.errors import UsageError, did_you_mean
from acm_compiler.sources.inputs import Inputs, is_hf, split_inputs

Control = Literal["budget", "cap", "k_lo", "k_hi"]
Axes = Mapping[str, int | Sequence[int]]
Call = tuple[tuple[Any, ...], dict[str, Any]]
# what a shape that is one number in the example is widened to: graphs take 1 for a constant
_WIDENED = 2


def example_call(model: nn.Module, inputs: Inputs) -> Call:
    """The example call, of two examples where one was given; decoders of transformers return no cache."""
    args, kwargs = split_inputs(inputs)
    if is_hf(model) and "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    if (batch := batch_of(args, kwargs)) == 0:
        raise UsageError("the example inputs hold no example", found="a batch of 0", expected="a batch of 1 or more")
    if batch == 1:
        args, kwargs = pytree.tree_map_only(Tensor, _twice, (args, kwargs))
    return args, kwargs


def _twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor] * _WIDENED) if tensor.dim() and len(tensor) == 1 else tensor


def batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Examples in a call: the length of the first axis of its first tensor. UsageError where there is none."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise UsageError("the example inputs hold no tensor with an axis", expected="the inputs of one call of the model")


def names_of(model: nn.Module, call: Call) -> list[str]:
    """The names of a call's inputs, in order: those of the model's forward, numbered for what goes to a *args."""
    args, kwargs = call
    names = []
    parameters = list(inspect.signature(model.forward).parameters.values())
    for place in range(len(args)):
        parameter = parameters[min(place, len(parameters) - 1)] if parameters else None
        numbered = parameter is None or parameter.kind is parameter.VAR_POSITIONAL
        names.append(f"input_{place}" if numbered or parameter is None else parameter.name)
    return [*names, *kwargs]


def free_axes(names: Sequence[str], call: Call, dynamic: Axes | None) -> dict[str, Any]:
    """The axes whose length is free, by input, as torch.export takes them.

    By default that is the batch, and the length of texts; `dynamic` names further axes by input, which must be free.
    UsageError for names and axes that are not there.
    """
    args, kwargs = call
    if dynamic is not None and not isinstance(dynamic, Mapping):
        found = type(dynamic).__name__
        raise UsageError("dynamic must be a mapping of inputs to axes", found=found, expected="such as {'x': 1}")
    values = dict(zip(names, (*args, *kwargs.values()), strict=True))
    asked = {name: _axes(name, axes, values) for name, axes in (dynamic or {}).items()}
    batch, length = batch_of(args, kwargs), _length(values)

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        sizes = enumerate((batch, length))
        return {axis: torch.export.Dim.AUTO for axis, size in sizes if axis < value.dim() and value.shape[axis] == size}

    specs = {name: pytree.tree_map(leaf, value) for name, value in values.items()}
    for name, axes in asked.items():
        specs[name] |= dict.fromkeys(axes, torch.export.Dim.DYNAMIC)
    return specs


def _axes(name: str, axes: int | Sequence[int], values: Mapping[str, Any]) -> tuple[int, ...]:
    """The axes that `dynamic` names of one input."""
    value = values.get(name)
    if not isinstance(value, Tensor):
        hint = did_you_mean(str(name), values)
        raise UsageError(f"no input of that name is a tensor{hint}", found=name, expected=", ".join(values))
    found = tuple(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
    if wrong := [axis for axis in found if type(axis) is not int or not 0 <= axis < value.dim()]:
        expected = f"0 to {value.dim() - 1}: an example has the shape {list(value.shape)}"
        raise UsageError("no such axis", where=name, found=repr(wrong[0]), expected=expected)
    return found


def _length(values: Mapping[str, Any]) -> int | None:
    """The tokens of texts: the second axis of the first input of whole numbers; None where there are none."""
    for value in values.values():
        if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point():
            return value.shape[1] if value.shape[1] > 1 else None
    return None


def with_signature(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Give `module`, whose forward takes what it is given, inputs of these names, which become those of its graph."""
    run, kind = module.forward, inspect.Parameter.POSITIONAL_OR_KEYWORD

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore
    module.forward = forward
    return module


def plain_output(output: Any) -> Any:
    """`output`, and for one of transformers' own classes a dict of its tensors, which is read without that library."""
    if not isinstance(output, Mapping) or type(output) is dict:
        return output
    return {name: plain_output(value) for name, value in output.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, (Tensor, Mapping)) or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))
