"""Run a user's model and restore its state: attributes, hooks, tensors written in place, generators, caches."""

from __future__ import annotations

import contextlib
import enum
import functools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode

from acm_compiler.data.draws import generators_restored
from acm_compiler.passes.capture.global_state import GlobalCaches, empty_filled, is_lru_cache
from acm_compiler.passes.capture.graph import tensors
from acm_compiler.passes.capture.op_names import written_tensors

# how far attributes are followed: a module's __dict__, a config there, the config's __dict__, a list there, items
_DEPTH = 6
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, enum.Enum)
_EMPTY = object()


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[list[Tensor]]:
    """The tensors the model holds; within it the model is in eval mode, after it everything is as it was before.

    That covers every module's attributes (so caches, flags and hooks), the lists, dicts, sets, NumPy arrays and plain
    objects that they hold, what in-place operations wrote to tensors the model owns, and the random generators, the
    model's own too. What the model's code keeps outside of it loses no more than fake tensors.
    """
    state, elsewhere = _State(model), GlobalCaches(model)
    training = {module: module.training for module in model.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with generators_restored(), _forked(), _WriteGuard(state.tensors):
        try:
            # not model.eval(): a user's train() may do more than set flags
            for module in training:
                module.training = False
            torch.backends.mha.set_fastpath_enabled(False)
            yield state.tensors
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            state.restore()
            elsewhere.forget_fakes()
            for module, flag in training.items():
                if module.training != flag:
                    module.training = flag


def _forked() -> contextlib.AbstractContextManager[None]:
    """Within it torch's generators may be drawn from: the CPU's, and those of an accelerator that is in use."""
    found = torch.accelerator.current_accelerator()
    kind = "cuda" if found is None else found.type
    module = torch.get_device_module(kind)
    # mps does not say, and draws for no capture: its generator cannot be forked
    in_use = getattr(module, "is_initialized", lambda: False)()
    return torch.random.fork_rng(devices=range(module.device_count()) if in_use else (), device_type=kind)


class _State:
    """Shallow copies of everything mutable that is reachable from a model's modules, and how to put them back."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._slots: list[tuple[Any, dict[types.MemberDescriptorType, Any]]] = []
        self._undo: list[Callable[[], object]] = []
        self._caches: list[tuple[Any, Any]] = []
        modules = list(model.modules())
        seen = {id(module) for module in modules}
        level: list[Any] = [vars(module) for module in modules]
        for _ in range(_DEPTH):
            level = [part for value in level if id(value) not in seen for part in self._remember(value, seen)]

    def _remember(self, value: Any, seen: set[int]) -> Iterable[Any]:
        """Note how to put `value` back; its parts, which are remembered next."""
        seen.add(id(value))
        if value is None or isinstance(value, (str, int, float, *_OPAQUE)):
            return ()
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif is_lru_cache(value):
            self._caches.append((value, value.cache_info()))
        elif isinstance(value, dict):
            self._containers.append((value, list(value.items())))
            return value.values()
        elif isinstance(value, (list, set, deque, tuple)):
            if not isinstance(value, tuple):
                self._containers.append((value, list(value)))
            return value
        else:
            if (undo := _put_back(value)) is not None:
                self._undo.append(undo)
            if slots := _slots(value):
                self._slots.append((value, slots))
            attributes = getattr(value, "__dict__", None)
            return (*slots.values(), *([attributes] if isinstance(attributes, dict) else []))
        return ()

    def restore(self) -> None:
        """Put every container back to its contents of the start, touching none that did not change."""
        for container, items in self._containers:
            if isinstance(container, dict):
                _restore_dict(container, items)
            elif len(container) != len(items) or any(a is not b for a, b in zip(container, items, strict=True)):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(items)
        for value, slots in self._slots:
            for slot, before in slots.items():
                if _filled(slot, value) is not before:
                    slot.__set__(value, before) if before is not _EMPTY else slot.__delete__(value)
        for undo in self._undo:
            undo()
        empty_filled(self._caches)


def _put_back(value: Any) -> Callable[[], object] | None:
    """A call that puts a generator or an array back to what it is now, None for other values."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return functools.partial(_refill, value, value.copy())
    return None


def _refill(array: np.ndarray, before: np.ndarray) -> None:
    if array.flags.writeable and array.shape == before.shape:
        array[...] = before


def _slots(value: Any) -> dict[types.MemberDescriptorType, Any]:
    """The slots that an object's classes declare, and what is in them."""
    declared = (vars(kind).values() for kind in type(value).__mro__ if "__slots__" in vars(kind))
    found = (slot for slots in declared for slot in slots if isinstance(slot, types.MemberDescriptorType))
    return {slot: _filled(slot, value) for slot in found}


def _filled(slot: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _EMPTY


def _restore_dict(container: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    if len(container) == len(items) and all(
        k is key and v is value for (k, v), (key, value) in zip(container.items(), items, strict=True)
    ):
        return
    # the base class's methods: a subclass may forbid or redefine them
    kind = OrderedDict if isinstance(container, OrderedDict) else dict
    kind.clear(container)
    for key, value in items:
        kind.__setitem__(container, key, value)


class _WriteGuard(TorchFunctionMode):
    """Undoes, on exit, what calls within it wrote to the memory of `owned` tensors; copies only what is written."""

    def __init__(self, owned: Sequence[Tensor]) -> None:
        super().__init__()
        self._owned = {storage._cdata for t in owned if (storage := storage_of(t)) is not None}
        self._contents: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self._data: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in self._about_to_write(func, args, kwargs):
            storage = storage_of(tensor)
            if storage is None or storage._cdata not in self._owned or tensor.is_meta:
                continue
            # `tensor.data = other` leaves the memory as it is and gives the tensor another
            if func.__name__ == "__set__":
                self._data.append((tensor, tensor.data))
            elif storage._cdata not in self._contents:
                self._contents[storage._cdata] = (storage, storage.clone())
        return func(*args, **kwargs)

    @staticmethod
    def _about_to_write(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if func in (nn.functional.embedding, nn.functional.embedding_bag):
            # with max_norm, looking rows up rescales them in place
            renormalizes = kwargs.get("max_norm") is not None or (len(args) > 3 and args[3] is not None)
            return tensors((args[:2], kwargs.get("weight"))) if renormalizes else []
        return written_tensors(func, args, kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, data in reversed(self._data):
            tensor.data = data
        for storage, contents in self._contents.values():
            storage.copy_(contents)


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The memory behind a tensor, None for kinds that have none of their own (sparse ones, wrappers)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
