"""Tensors that a model's code keeps outside of the model: in `lru_cache`s and in globals of its files."""

from __future__ import annotations

import functools
import sys
from types import CellType
from typing import Any

from torch import nn

from acm_compiler.passes.capture.nested import tensors

_OWN_CACHES = ("torch", "builtins", "typing", "collections", "abc")
_MISSING = object()
_EMPTY = CellType()


class GlobalCaches:
    """What the files of a model's classes keep, so that fake tensors can be taken out of it after a run.

    A mask built once per size and kept in a module-level dict would otherwise be a fake one ever after.
    """

    def __init__(self, model: nn.Module) -> None:
        classes = {cls for module in model.modules() for cls in type(module).__mro__}
        classes = {cls for cls in classes if cls.__module__.partition(".")[0] not in _OWN_CACHES}
        files = {name: vars(sys.modules[name]) for cls in classes if (name := cls.__module__) in sys.modules}
        kept = [value for space in (*files.values(), *map(vars, classes)) for value in space.values()]
        known = [inner for value in kept for inner in (value, *_enclosed(value))]
        self._caches = [(value, value.cache_info()) for value in known if is_lru_cache(value)]
        dicts = [*files.values(), *(value for value in kept if type(value) is dict)]
        self._dicts = [(value, dict(value)) for value in dicts]
        self._lists = [(value, list(value)) for value in kept if type(value) is list]

    def forget_fakes(self) -> None:
        """Empty the caches that were added to, and put back or take out what now holds a fake tensor."""
        for cache, info in self._caches:
            if cache.cache_info().misses != info.misses:
                cache.cache_clear()
        for values, before in self._dicts:
            for key, value in list(values.items()):
                old = before.get(key, _MISSING)
                if value is not old and _holds_fake(value):
                    values.pop(key) if old is _MISSING else values.update({key: old})
        for items, former in self._lists:
            if any(_holds_fake(item) for item in items):
                items[:] = former


def is_lru_cache(value: Any) -> bool:
    """Whether `value` is a function wrapped by `functools.lru_cache` or `cache`."""
    return isinstance(value, functools._lru_cache_wrapper)


def _enclosed(function: Any) -> list[Any]:
    """What a function carries along from where it was defined, as wrappers do."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != _EMPTY]


def _holds_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(tensor, FakeTensor) for tensor in tensors(value))
