"""Graphs of the backend as short texts: a line per call, its weights by the module that holds them."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from acm_compiler.passes.lower.acm_nodes import GATED, GATES, LEARNERS, call_of


class Listing:
    """Prints a graph again and again; a node keeps its number, so that texts before and after a pass compare."""

    def __init__(self) -> None:
        self._names: dict[fx.Node, str] = {}

    def text(self, graph: fx.Graph) -> str:
        """One line per node, without those of inputs."""
        for node in graph.nodes:
            self._names.setdefault(node, _path(node) if node.op == "placeholder" else self._numbered(node))
        return "".join(f"{self._line(node)}\n" for node in graph.nodes if node.op != "placeholder")

    def _numbered(self, node: fx.Node) -> str:
        kind = _kind(node)
        return f"{kind}_{1 + sum(name.rpartition('_')[0] == kind for name in self._names.values())}"

    def _line(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"return {self._named(node.args[0])}"
        if node.target in (*GATES, *GATED, *LEARNERS):
            tensors = {name: value for name, value in call_of(node)._asdict().items() if value is not None}
            # tensors of one module are named once, by the module
            parts = list(dict.fromkeys(self._whole(name, value) for name, value in tensors.items()))
        else:
            parts = [self._named(arg) for arg in node.args]
        options = [f"{name}={self._named(value)}" for name, value in node.kwargs.items()]
        return f"{self._names[node]} = {_kind(node)}({', '.join([*parts, *options])})"

    def _whole(self, name: str, tensor: fx.Node) -> str:
        path = self._named(tensor)
        return f"{path.rpartition('.')[0]}.*" if tensor.op == "placeholder" and "." in path else f"{name}={path}"

    def _named(self, value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self._named, value))})"
        return self._names[value] if isinstance(value, fx.Node) else str(value)


def _kind(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")


def _path(node: fx.Node) -> str:
    """The path of a parameter or buffer, without that of the whole model, from Dynamo's name of it; else `input`."""
    _, inside, path = str(node.target).partition("_modules_")
    return re.sub(r"_(modules|parameters|buffers)_", ".", path).strip("_") if inside else "input"
