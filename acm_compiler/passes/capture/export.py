"""Sees a model through torch.export, for those whose calls cannot be recorded, in the recorder's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from acm_compiler.passes.capture.graph import Capture, ModuleCall, Signature, describe, leaves
from acm_compiler.passes.capture.recorder import canonical_names, module_calls_watched
from acm_compiler.sources.inputs import Inputs, split_inputs
from acm_compiler.sources.user_code import traced_line

_CHECKS = {torch.ops.aten._assert_tensor_metadata.default}


def capture_exported(model: nn.Module, inputs: Inputs) -> Capture:
    """The capture of the model's forward as torch.export sees it; the model is in eval mode already.

    Signatures are there only for calls whose tensors can be told from the graph. Raises what torch.export raises.
    """
    args, kwargs = split_inputs(inputs)
    seen: dict[ModuleCall, _Given] = {}

    def enter(call: ModuleCall, args: Any, kwargs: Any) -> None:
        given = list(leaves((args, kwargs)))
        count = sum(isinstance(leaf, Tensor) for leaf in given)
        seen[call] = _Given(count, len(given) - count, tuple(kwargs))

    def leave(call: ModuleCall, result: Any) -> None:
        seen[call].gives_tensor = isinstance(result, Tensor)

    with module_calls_watched(model, enter=enter, leave=leave):
        program = torch.export.export(model, args, kwargs, strict=False)
    # without this, a write into a view hides what flows through it
    graph, inputs_seen = _Translation(model, program.run_decompositions({})).translate()
    return Capture(graph=graph, method="export", signatures=_signatures(graph, seen), inputs=inputs_seen)


@dataclass(slots=True)
class _Given:
    """Arguments of a module call by number and name, and True where it gave a single tensor."""

    tensors: int
    others: int
    keywords: tuple[str, ...]
    gives_tensor: bool = False


class _Translation:
    """Turns an exported program into a graph with the meta data that a recording has."""

    def __init__(self, model: nn.Module, program: Any) -> None:
        self._program, self._signature = program, program.graph_signature
        self._graph = fx.Graph()
        self._nodes: dict[fx.Node, fx.Node] = {}
        names = canonical_names(model)
        self._modules = {name: names[module] for name, module in model.named_modules(remove_duplicate=False)}
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        self._tensors = {name: first.setdefault(id(tensor), name) for name, tensor in named}
        self._by_name: dict[str, fx.Node] = {}
        self._numbers: dict[str, dict[str, int]] = {}

    def translate(self) -> tuple[fx.Graph, tuple[str, ...]]:
        """The graph, and the names of the placeholders that are the model's inputs."""
        inputs = []
        for old in self._program.graph.nodes:
            if old.op == "placeholder":
                self._nodes[old] = new = self._owned(old) or self._input(old)
                if new.op == "placeholder" and new.meta["shape"] is not None:
                    inputs.append(new.name)
            elif old.op == "output":
                given = {n for n in self._signature.user_outputs if isinstance(n, str)}
                results = [n for n in self._program.graph.output_node().all_input_nodes if n.name in given]
                self._graph.output(tuple(self._nodes[n] for n in results))
            elif old.target not in _CHECKS:
                self._nodes[old] = new = self._graph.node_copy(old, lambda n: self._nodes[n])
                new.meta.clear()
                const = all(used.meta["const"] for used in new.all_input_nodes)
                self._describe(new, old, const=const)
        return self._graph, tuple(inputs)

    def _owned(self, old: fx.Node) -> fx.Node | None:
        signature = self._signature
        name = signature.inputs_to_parameters.get(old.name) or signature.inputs_to_buffers.get(old.name)
        constant = signature.inputs_to_lifted_tensor_constants.get(old.name)
        if name is None and constant is None:
            return None
        target = self._tensors.get(name, name) if name else f"_const{len(self._by_name)}"
        if target not in self._by_name:
            node = self._by_name[target] = self._graph.create_node("get_attr", target)
            self._describe(node, old, const=name is None)
            node.meta.update(param=target if name else None, is_buffer=old.name in signature.inputs_to_buffers)
            if constant is not None:
                node.meta["value"] = self._program.constants[constant]
        return self._by_name[target]

    def _input(self, old: fx.Node) -> fx.Node:
        node = self._graph.placeholder(old.name)
        # a number that the model was given is an input for torch.export
        self._describe(node, old, const=not isinstance(old.meta.get("val"), Tensor))
        return node

    def _describe(self, node: fx.Node, old: fx.Node, *, const: bool) -> None:
        stack = self._stack(old.meta.get("nn_module_stack") or {})
        source = traced_line(old.meta.get("stack_trace"))
        describe(node, old.meta.get("val"), const=const, stack=stack, source=source)

    def _stack(self, entries: Mapping[str, Sequence[Any]]) -> tuple[ModuleCall, ...]:
        calls = []
        for key, (path, _) in entries.items():
            name = self._modules.get(path.partition("@")[0], path)
            if name:
                # torch.export counts the calls of each alias for itself; `key` tells them all apart
                numbers = self._numbers.setdefault(name, {})
                calls.append(ModuleCall(name, numbers.setdefault(key, len(numbers))))
        return tuple(calls)


def _signatures(graph: fx.Graph, seen: Mapping[ModuleCall, _Given]) -> dict[ModuleCall, Signature]:
    inside: dict[ModuleCall, set[fx.Node]] = {}
    for node in graph.nodes:
        for call in node.meta.get("stack", ()):
            inside.setdefault(call, set()).add(node)
    signatures = {}
    for call, nodes in inside.items():
        given = seen.get(call)
        inputs = _inputs_of(graph, nodes)
        results = [n for n in nodes if any(user not in nodes for user in n.users)]
        if given is None or len(inputs) != given.tensors:
            continue
        output = results[0].name if given.gives_tensor and len(results) == 1 else None
        signatures[call] = Signature(inputs=inputs, others=given.others, keywords=given.keywords, output=output)
    return signatures


def _inputs_of(graph: fx.Graph, nodes: set[fx.Node]) -> tuple[str, ...]:
    """The values that `nodes` read from outside, in the order of their making; the model's own do not count."""
    read = {used for node in nodes for used in node.all_input_nodes if used not in nodes}
    return tuple(n.name for n in graph.nodes if n in read and n.op != "get_attr")
