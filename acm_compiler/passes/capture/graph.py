"""What a capture is: a graph of torch-level calls, and who called which module with what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: its canonical path and which of its calls, counted from 0, this is."""

    fqn: str
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What went into and came out of one module call.

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
