"""Run a live model once and record every torch-level call, module call and tensor as an fx graph.

Module calls are watched through hooks, which are removed afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import DisableTorchFunction
from torch.fx.node import map_aggregate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from acm_compiler.passes.capture.graph import Capture, ModuleCall, Signature, describe, leaves, tensors
from acm_compiler.passes.capture.live_tensors import LiveTensors
from acm_compiler.passes.capture.op_names import written_tensors
from acm_compiler.sources.inputs import call_model
from acm_compiler.sources.user_code import running_line

# calls that turn a tensor's value into something of Python's; they become nodes, for a value that leaves the graph
_VALUE_READS = frozenset(
    {"item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__contains__", "__bool__"}
    | {"__int__", "__float__", "__index__", "__complex__", "__dlpack__", "__reduce_ex__", "__format__"}
)


class UnseenTensor(Exception):
    """A tensor reached a call although nothing that was recorded had made it."""


class Recorder(TorchFunctionMode):
    """A mode under which one forward pass is written down; `run` gives the capture.

    `stand_in` turns any tensor into the one that calls really get, a fake one; None runs with the tensors
    themselves, of which `existing` were there before.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stand_in: Callable[[Tensor], Tensor] | None = None,
        existing: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._model, self._stand_in = model, stand_in
        self._existing = {id(tensor) for tensor in existing}
        self._graph = fx.Graph()
        self._live = LiveTensors(self._derive, real=stand_in or (lambda tensor: tensor))
        self._signatures: dict[ModuleCall, Signature] = {}
        self._names: dict[int, tuple[str, bool]] = {}
        for is_buffer, named in ((False, model.named_parameters), (True, model.named_buffers)):
            for name, tensor in named(remove_duplicate=False):
                self._names.setdefault(id(tensor), (name, is_buffer))
        self._constants = 0
        self._stack: tuple[ModuleCall, ...] = ()
        self._opened: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = []

    def run(self, inputs: Any, names: Sequence[str]) -> Capture:
        """The capture of the model's forward for `inputs`, whose tensors get placeholders called `names`."""
        placeholders = []
        for name, tensor in zip(names, tensors(inputs), strict=True):
            node = self._graph.placeholder(name)
            self._describe(node, tensor, const=False)
            self._live.bind(tensor, node)
            placeholders.append(node.name)
        # hooks run under the mode, and must not record what they do themselves
        enter, leave = _unrecorded(self._enter), _unrecorded(self._leave)
        with module_calls_watched(self._model, enter=enter, leave=leave), self:
            result = call_model(self._model, inputs)
        self._graph.output(tuple(self._node(tensor) for tensor in _result_tensors(result)))
        return Capture(graph=self._graph, method="recorder", signatures=self._signatures, inputs=tuple(placeholders))

    def _enter(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        self._opened.append(((), 0, ()))  # `_leave` follows even where an argument is refused
        given = list(leaves((args, kwargs)))
        inputs = tuple(self._node(leaf).name for leaf in given if isinstance(leaf, Tensor))
        self._opened[-1] = (inputs, len(given) - len(inputs), tuple(kwargs))
        if call.fqn:
            self._stack = (*self._stack, call)

    def _leave(self, call: ModuleCall, result: Any) -> None:
        inputs, others, keywords = self._opened.pop()
        if not call.fqn:
            return
        self._stack = self._stack[:-1]
        output = self._node(result).name if isinstance(result, Tensor) else None
        self._signatures[call] = Signature(inputs=inputs, others=others, keywords=keywords, output=output)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = written_tensors(func, args, kwargs)
        given = tensors((args, kwargs))
        result, stands_for = self._call(func, args, kwargs, given)
        if isinstance(result, Tensor) and (original := stands_for.get(id(result))) is not None:
            # `x.contiguous()` may return x itself: a new object keeps the two apart in the graph
            in_place = any(original is tensor for tensor in written)
            result = original if in_place else result.detach()
        if written or tensors(result) or (given and getattr(func, "__name__", "") in _VALUE_READS):
            self._record(func, args, kwargs, result=result, written=written)
        return result

    def _call(
        self, func: Callable[..., Any], args: Any, kwargs: Any, given: list[Tensor]
    ) -> tuple[Any, dict[int, Tensor]]:
        """The call's result, and for each tensor that it really got (by id) the tensor it was given for."""
        if self._stand_in is None:
            return func(*args, **kwargs), {id(t): t for t in given}
        _refuse_mixed_types(func, given)
        actual = {id(t): self._stand_in(t) for t in given}
        if any(actual[id(t)] is not t for t in given):
            args, kwargs = _replace((args, kwargs), lambda t: actual[id(t)])
        return func(*args, **kwargs), {id(actual[id(t)]): t for t in given}

    def _record(self, func: Callable[..., Any], args: Any, kwargs: Any, *, result: Any, written: list[Tensor]) -> None:
        name = getattr(func, "__name__", "call")
        if name == "__set__":
            # the setter of `data`, the only one that writes
            self._live.write(args[0], self._node(args[1]))
            return
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
            func, args = getattr, (args[0], name)
        node_args, node_kwargs = _replace((tuple(args), dict(kwargs)), self._node)
        node = self._graph.create_node("call_function", func, node_args, node_kwargs, name=name.strip("_"))
        const = all(used.meta["const"] for used in node.all_input_nodes)
        self._describe(node, written[0] if result is None and written else result, const=const)
        for tensor in written:
            self._live.write(tensor, node)
        if not any(result is tensor for tensor in written):
            self._bind_result(result, node, const)

    def _bind_result(self, result: Any, node: fx.Node, const: bool) -> None:
        if isinstance(result, Tensor):
            self._live.bind(result, node)
        elif isinstance(result, (tuple, list, dict)):
            items = result.items() if isinstance(result, dict) else enumerate(result)
            for key, item in items:
                if tensors(item):
                    part = self._graph.call_function(operator.getitem, (node, key))
                    self._describe(part, item, const=const)
                    self._bind_result(item, part, const)

    def _describe(self, node: fx.Node, value: Any, *, const: bool) -> None:
        source = running_line(until=call_model.__code__) if node.op == "call_function" else None
        describe(node, value, const=const, stack=self._stack, source=source)

    def _derive(self, target: Callable[..., Tensor], args: tuple[fx.Node, ...], tensor: Tensor) -> fx.Node:
        node = self._graph.call_function(target, args)
        self._describe(node, tensor, const=all(arg.meta["const"] for arg in args))
        return node

    def _node(self, tensor: Tensor) -> fx.Node:
        node = self._live.node(tensor)
        if node is None:
            node = self._owned(tensor) or self._live.relative(tensor)
            if node is None:
                place = running_line(until=call_model.__code__) or "the model"
                raise UnseenTensor(f"{place} uses a {tuple(tensor.shape)} tensor that no torch call made")
            self._live.bind(tensor, node)
        return node

    def _owned(self, tensor: Tensor) -> fx.Node | None:
        """A new node for a tensor that was there before the run, None for others."""
        name, is_buffer = self._names.get(id(tensor), (None, False))
        existed = id(tensor) in self._existing if self._stand_in is None else self._stand_in(tensor) is not tensor
        if name is None and not existed:
            return None
        node = self._graph.create_node("get_attr", name or f"_const{self._constants}")
        self._describe(node, tensor, const=name is None)
        node.meta.update(param=name, is_buffer=is_buffer, stack=())
        if name is None:
            self._constants += 1
            node.meta["value"] = tensor
        return node


def _unrecorded(function: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        with DisableTorchFunction():
            function(*args)

    return run


def _replace(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with its tensors replaced, as arguments that fx can hold."""
    return map_aggregate(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def _result_tensors(result: Any) -> Iterator[Tensor]:
    for leaf in leaves(result):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from tensors(vars(leaf))


def _refuse_mixed_types(func: Callable[..., Any], given: Sequence[Tensor]) -> None:
    """Raise what torch raises for real tensors: a linear of fake ones takes any types."""
    types = {tensor.dtype for tensor in given} if func is functional.linear else ()
    if len(types) > 1 and not torch.is_autocast_enabled(given[0].device.type):
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {given[0].dtype} and {given[1].dtype}")


def canonical_names(model: nn.Module) -> dict[nn.Module, str]:
    """Each module's first path in the model; the root's is empty."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, name)
    return names


@contextlib.contextmanager
def module_calls_watched(
    model: nn.Module,
    *,
    enter: Callable[[ModuleCall, Any, Any], None],
    leave: Callable[[ModuleCall, Any], None],
) -> Iterator[None]:
    """Within it `enter(call, args, kwargs)` and `leave(call, result)` are called around every module's call.

    The root's call has an empty path. `leave` comes also, with result None, for a call that raised. Calls are
    counted from 0 anew whenever the root is called. TorchScript modules take no hooks and are not watched.
    """
    counts: Counter[str] = Counter()
    opened: list[ModuleCall] = []

    # the name is bound, not looked up: torch.export runs a copy of the root
    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not name:
            counts.clear()
        call = ModuleCall(name, counts[name])
        counts[name] += 1
        opened.append(call)
        enter(call, args, kwargs)

    def after(module: nn.Module, args: Any, result: Any) -> None:
        leave(opened.pop(), result)

    handles = []
    try:
        for module, name in canonical_names(model).items():
            if not isinstance(module, torch.jit.ScriptModule):
                enters = functools.partial(before, name)
                handles.append(module.register_forward_pre_hook(enters, prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(after, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
