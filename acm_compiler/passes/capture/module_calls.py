"""Watches the calls of a live model's modules through hooks that are gone afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from acm_compiler.passes.capture.graph import ModuleCall


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
