"""The call that is exported: example inputs with the model's names for them, axes of any length, plain outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acm_compiler.errors import UsageError, did_you_mean
from acm_compiler.sources.inputs import Inputs, is_hf, split_inputs

Control = Literal["budget", "cap", "k_lo", "k_hi"]
Axes = Mapping[str, int | Sequence[int]]
Call = tuple[tuple[Any, ...], dict[str, Any]]
Outputs = Callable[[Any], Any]
# what a shape that is one number in the example is widened to: graphs take 1 for a constant
_WIDENED = 2
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def example_call(model: nn.Module, inputs: Inputs) -> Call:
    """The example call; decoders of transformers return no cache. UsageError for a batch of none."""
    args, kwargs = split_inputs(inputs)
    if is_hf(model) and "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    if batch_of(args, kwargs) == 0:
        raise UsageError("the example inputs hold no example", found="a batch of 0", expected="a batch of 1 or more")
    return args, kwargs


def widened(call: Call) -> Call:
    """The call of two examples where it is of one."""
    return call if batch_of(*call) > 1 else pytree.tree_map_only(Tensor, _twice, call)


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
        sizes = enumerate((batch, value.shape[1] if _is_text(value) else length))
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
    return next((value.shape[1] for value in values.values() if _is_text(value)), None)


def _is_text(value: Any) -> bool:
    whole = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    return whole and value.shape[1] > 1


def with_signature(module: nn.Module, names: Sequence[str], outputs: Outputs) -> nn.Module:
    """Give `module`, whose forward takes what it is given, inputs of these names, which become those of its graph.

    Its outputs become what `outputs` makes of them.
    """
    run, kind = module.forward, inspect.Parameter.POSITIONAL_OR_KEYWORD

    def forward(*args: Any, **kwargs: Any) -> Any:
        return outputs(run(*args, **kwargs))

    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore
    module.forward = forward
    return module


def plain_output(output: Any) -> Any:
    """`output` in dicts, lists and tuples, which are read without the library that its own classes come from.

    Of mappings and dataclasses, such as the outputs of transformers' models, what is no tensor, number or container of
    these (a cache, a text) is left out; in sequences None stands for it.
    """
    if is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, Mapping):
        return {name: plain_output(value) for name, value in output.items() if _is_plain(value)}
    if isinstance(output, (tuple, list)):
        values = [plain_output(value) if _is_plain(value) else None for value in output]
        return values if isinstance(output, list) else tuple(values)
    return output


def tensors_alone(output: Any) -> Any:
    """`plain_output` with None for numbers, for formats whose programs give tensors alone."""
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else None, plain_output(output))


def copied_tensors(output: Any) -> Any:
    """`tensors_alone`, in copies: in ONNX, an output that is an input would share its name."""
    return pytree.tree_map_only(Tensor, torch.clone, tensors_alone(output))


def _is_plain(value: Any) -> bool:
    containers = (Mapping, tuple, list, NoneType)
    return not isinstance(value, type) and (isinstance(value, (Tensor, *_NUMBERS, *containers)) or is_dataclass(value))
