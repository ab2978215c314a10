"""A captured model: its graph of torch-level calls, and tensors nested in their arguments and results."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.utils._pytree as pytree
from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: its canonical path and which of its calls, counted from 0, this is."""

    fqn: str
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Inputs and output of one module call.

    `inputs`: the graph nodes of the tensor arguments in order, nested ones included (parameters and buffers:
    their `get_attr` node). `others`: how many arguments were no tensors, None included. `keywords`: the names
    of the keyword arguments given. `output`: the node of the result when it is a tensor, None for anything else.
    """

    inputs: tuple[str, ...]
    others: int
    keywords: tuple[str, ...]
    output: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One run of a model, in eval mode and without gradients, as a graph.

    `graph` holds placeholders, `get_attr`, `call_function` and one output node. A property such as `x.mT` is
    `getattr(x, "mT")`; reading a value into Python (`item`, `tolist`, `bool`) is a call without a shape. Every
    node's `meta` holds

    - `shape`: tuple of ints, or None when the node is not one tensor; `dtype` likewise
    - `param`: the canonical name of the parameter or buffer that a `get_attr` reads, else None; `is_buffer`
    - `const`: True where neither an input nor a registered tensor of the model is involved
    - `value`: the tensor, on a `get_attr` whose tensor is registered nowhere (target `_const0`, ...)
    - `stack`: the `ModuleCall`s around the call, outermost first, without the root
    - `source`: `file.py:line` of the innermost line outside torch and this package, or None

    A write into a tensor gives that tensor a new node; other tensors that share its memory become
    `overwritten(old, write)` when they are next read.
    """

    graph: fx.Graph
    method: Literal["recorder", "export"]
    signatures: dict[ModuleCall, Signature]
    inputs: tuple[str, ...]


def upwards(
    start: Iterable[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node]], *, stop: Collection[fx.Node] = ()
) -> Iterator[fx.Node]:
    """The nodes in `start` and what they come from by `sources`, nearest first, each once; not above one in `stop`."""
    waiting = deque(dict.fromkeys(start))
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        yield node
        fresh = [] if node in stop else [source for source in sources(node) if source not in seen]
        seen.update(fresh)
        waiting.extend(dict.fromkeys(fresh))


def describe(node: fx.Node, value: Any, *, const: bool, stack: tuple[ModuleCall, ...], source: str | None) -> None:
    """Give a node the `meta` of one that gives `value`, and reads no tensor that is registered."""
    known = isinstance(value, Tensor)
    node.meta.update(
        shape=tuple(value.shape) if known else None,
        dtype=value.dtype if known else None,
        param=None,
        is_buffer=False,
        const=const,
        stack=stack,
        source=source,
    )


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


def batch_size(inputs: Any) -> int | None:
    """The number of examples in a model's inputs: the entries of the first tensor that has axes; None without one."""
    return next((tensor.shape[0] for tensor in tensors(inputs) if tensor.dim()), None)


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
