"""Graph nodes of live tensors, followed through writes, views and reused memory addresses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, UntypedStorage, fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from acm_compiler.passes.capture.isolate import storage_of


def overwritten(old: Tensor, write: Tensor) -> Tensor:
    """Graph target: the value of `old` after `write` changed memory that both share."""
    raise NotImplementedError("an `overwritten` node says what depends on what; it cannot be run")


def alias_of(known: Tensor) -> Tensor:
    """Graph target: a tensor made out of sight that shares `known`'s memory."""
    raise NotImplementedError("an `alias_of` node says what depends on what; it cannot be run")


@dataclass(slots=True)
class _Binding:
    """A tensor's node, and how many writes had been seen when it became that."""

    tensor: weakref.ref[Tensor]
    node: fx.Node
    writes: int
    memory: StorageWeakRef | None


class LiveTensors:
    """Tensors to nodes, by identity. Holds no tensor alive, and is not misled by an address used again.

    `derive(target, args, tensor)` adds a node for a tensor whose value follows from other nodes; `real`
    gives the tensor whose memory stands for a given one's.
    """

    def __init__(
        self,
        derive: Callable[[Callable[..., Tensor], tuple[fx.Node, ...], Tensor], fx.Node],
        *,
        real: Callable[[Tensor], Tensor],
    ) -> None:
        self._derive, self._real = derive, real
        self._bindings: dict[int, _Binding] = {}
        self._latest: dict[int, _Binding] = {}
        self._last_write: dict[int, tuple[int, fx.Node]] = {}
        self._writes = 0

    def bind(self, tensor: Tensor, node: fx.Node) -> None:
        """From now on `tensor` is `node`."""
        storage = self._storage(tensor)
        memory = None if storage is None else StorageWeakRef(storage)
        binding = _Binding(weakref.ref(tensor), node, self._writes, memory)
        self._bindings[id(tensor)] = binding
        if memory is not None:
            self._latest[memory.cdata] = binding

    def write(self, tensor: Tensor, node: fx.Node) -> None:
        """`node` wrote to `tensor`: it is the tensor now, and the others in its memory have changed too."""
        self._writes += 1
        self.bind(tensor, node)
        memory = self._bindings[id(tensor)].memory
        if memory is not None:
            self._last_write[memory.cdata] = (self._writes, node)

    def node(self, tensor: Tensor) -> fx.Node | None:
        """The node that `tensor` is now, None when it was never bound."""
        binding = self._bindings.get(id(tensor))
        if binding is None or binding.tensor() is not tensor:
            return None
        if self._last_write and binding.memory is not None:
            count, write = self._last_write.get(binding.memory.cdata, (0, binding.node))
            if count > binding.writes:
                node = self._derive(overwritten, (binding.node, write), tensor)
                self.bind(tensor, node)
                return node
        return binding.node

    def relative(self, tensor: Tensor) -> fx.Node | None:
        """A new node for a tensor that was never bound but shares memory with one that was, else None."""
        storage = self._storage(tensor)
        # a weak reference keeps the address from being used again, so equal addresses are one memory
        known = None if storage is None else self._latest.get(storage._cdata)
        return None if known is None else self._derive(alias_of, (known.node,), tensor)

    def _storage(self, tensor: Tensor) -> UntypedStorage | None:
        return storage_of(self._real(get_unwrapped(tensor) if is_functorch_wrapped_tensor(tensor) else tensor))
