"""Tensors inside tuples, mappings and dataclasses: how models take their arguments and give their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor


def leaves(value: Any) -> Iterator[Any]:
    """Everything in `value` that is not a container, in order; other objects are leaves, None included."""
    if isinstance(value, (Tensor, str)) or value is None:
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None))
    else:
        yield value


def tensors(value: Any) -> list[Tensor]:
    """The tensors in `value`, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to each tensor, once however often it occurs; other leaves are shared."""
    results: dict[int, Tensor] = {}

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor):
            if id(item) not in results:
                results[id(item)] = function(item)
            return results[id(item)]
        if isinstance(item, Mapping) and tensors(item):
            return type(item)({key: pytree.tree_map(leaf, entry) for key, entry in item.items()})  # type: ignore[call-arg]
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.init}
            return dataclasses.replace(item, **{k: pytree.tree_map(leaf, v) for k, v in fields.items()})
        return item

    return pytree.tree_map(leaf, value)
