"""Which tensors a torch-level call writes to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acm_compiler.passes.capture.graph import tensors

_AUGMENTED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_DUNDERS = {f"__i{name}__" for name in (*_AUGMENTED, "lshift", "rshift")} | {"__setitem__"}


def written_tensors(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that `func` writes to, judged by torch's naming and schemas."""
    found: list[Tensor] = []
    for position, name in _written_arguments(func):
        if position < len(args):
            found += tensors(args[position])
        elif name in kwargs:
            found += tensors(kwargs[name])
    if kwargs:
        found += tensors(kwargs.get("out"))
    if _works_in_place(func, args, kwargs):
        found += tensors(args[0] if args else kwargs.get("input"))
    return found


def _works_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `inplace` is asked for, by name or, as torch's modules do, by place; not of a dropout in eval mode."""
    asked = dict(zip(_parameters(func), args, strict=False)) | dict(kwargs)
    if "dropout" in getattr(func, "__name__", "") and asked.get("training") is False:
        return False
    return asked.get("inplace") is True


@functools.cache
def _parameters(func: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of a function of Python; none of a builtin, which has no `inplace`."""
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return ()


@functools.cache
def _written_arguments(func: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that `func` always writes to."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if isinstance(func, torch._ops.OpOverload):
        arguments = enumerate(func._schema.arguments)
        return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    name = getattr(func, "__name__", "")
    if getattr(func, "__module__", "") == "_operator":
        name = f"__{name}__"  # operator.iadd
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in _DUNDERS or _sets_data(func):
        return ((0, "self"),)
    return ()


def _sets_data(func: Callable[..., Any]) -> bool:
    """Whether `func` is the setter behind `tensor.data = value`."""
    prop = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__set__" and getattr(prop, "__name__", "") == "data"
