"""State outside of a model that runs of it touch: torch.compile's stance, and caches in files of its code."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from types import CellType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from acm_compiler.passes.capture.graph import tensors


class Eager:
    """Turns torch.compile off while anyone holds it; its stance is one for all threads, so the last one restores it."""

    def __init__(self) -> None:
        self._lock, self._holders, self._stance = threading.Lock(), 0, contextlib.ExitStack()
        self._forced = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Compiled functions run as the eager code that they were within it."""
        with self._lock:
            self._holders += 1
        try:
            self.force()
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._forced = False
                    self._stance.close()

    def force(self) -> None:
        """See to it while it is held, once anything is compiled: before, the import would take seconds."""
        with self._lock:
            if self._holders and not self._forced and "torch._dynamo" in sys.modules:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
                self._forced = True


EAGER = Eager()


# files whose caches are none of a model's
_NOT_SEARCHED = ("torch", "builtins", "typing", "collections", "abc")
_MISSING = object()
_EMPTY = CellType()


class GlobalCaches:
    """Values kept by the files of a model's classes, so that fake tensors can be taken out of them after a run.

    A mask built once per size and kept in a module-level dict would otherwise be a fake one ever after.
    """

    def __init__(self, model: nn.Module) -> None:
        classes = {cls for module in model.modules() for cls in type(module).__mro__}
        classes = {cls for cls in classes if cls.__module__.partition(".")[0] not in _NOT_SEARCHED}
        files = {name: vars(sys.modules[name]) for cls in classes if (name := cls.__module__) in sys.modules}
        kept = [value for names in (*files.values(), *map(vars, classes)) for value in names.values()]
        # a decorator may hide a cache behind a function of its own
        functions = [function for value in kept for function in (value, *enclosed(value))]
        self._caches = [(function, function.cache_info()) for function in functions if is_lru_cache(function)]
        # a file's names are a dict too: `global mask` puts a tensor there
        dicts = [*files.values(), *(value for value in kept if type(value) is dict)]
        self._dicts = [(value, dict(value)) for value in dicts]
        self._lists = [(value, list(value)) for value in kept if type(value) is list]

    def forget_fakes(self) -> None:
        """Empty the caches that were added to, and put back or take out what now holds a fake tensor."""
        empty_filled(self._caches)
        for values, before in self._dicts:
            for key, value in list(values.items()):
                old = before.get(key, _MISSING)
                if value is old or not _holds_fake(value):
                    continue
                if old is _MISSING:
                    del values[key]
                else:
                    values[key] = old
        for items, former in self._lists:
            if any(_holds_fake(item) for item in items):
                items[:] = former


def is_lru_cache(value: Any) -> bool:
    """True if `value` is a function wrapped by `functools.lru_cache` or `cache`."""
    return isinstance(value, functools._lru_cache_wrapper)


def empty_filled(caches: Iterable[tuple[Any, Any]]) -> None:
    """Empty the `lru_cache`s that were added to since they had these `cache_info`s."""
    for cache, info in caches:
        if cache.cache_info().misses != info.misses:
            cache.cache_clear()


def enclosed(function: Any) -> list[Any]:
    """Values that a function carries along from its definition, as wrappers do."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != _EMPTY]


def _holds_fake(value: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in tensors(value))
