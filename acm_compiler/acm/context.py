"""Per-call state of one thread or asyncio task: the settings of `acm.batch`, and observers.

Both are values of one context variable, found by the model's conversion, so that many may call one model at once.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy

from acm_compiler.acm.precision import autocast_type

_OPEN: ContextVar[_Open] = ContextVar("acm_compiler")
_THREADS = "acm_compiler.open"
_MANY = 256  # far more than anyone accumulates before a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Relaxed choices of one call of a site, for the losses: nu [batch, tokens, C], the mask [batch, tokens] or None.

    thread: the one that ran it; forward: the number, from 1, of the model's forward. Both are 0 where they are not
    known: compiled graphs do not tell.
    """

    nu: Tensor
    mask: Tensor | None
    thread: int = 0
    forward: int = 0


def keep_choices(kept: list[Choices], one: Choices) -> None:
    """Add those of one more forward; warns where nobody has taken them for long."""
    kept.append(one)
    if len(kept) == _MANY:
        warnings.warn(
            f"{_MANY} relaxed forwards and no acm.losses(model, budget): each keeps its graph in memory; "
            "call it after every forward, or end this by acm.relax(model, None)",
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Settings of one batch for the ACMs of a model.

    mask [batch, tokens], True at real tokens; skip_padding: the others run no learner; knob and k_lo [batch], one
    budget per example, and with them `most`: for every number of learners, from 0, the highest k of a site that has so
    many; `each`: as many entries as the call has examples, for certain, or since some site checks that.
    """

    mask: Tensor | None = None
    skip_padding: bool = False
    knob: Tensor | None = None
    k_lo: Tensor | None = None
    most: Tensor | None = None
    each: bool = False


class _Open:
    """Settings and observers open in a context: attributes `batch…` and `observers…` with the id of a conversion.

    `now` is the one of the caller's context, or the object itself where nothing is open. Its getter is written in C on
    purpose: Dynamo takes what it returns for an attribute, and its guards ask again in the context of every call.
    `ContextVar.get` itself breaks graphs of torch 2.11.
    """

    now = property(_OPEN.get)  # type: ignore[arg-type]


class _Held:
    """A value that everyone who was given it loses at once, also tasks that outlive the block that started them."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_NOTHING = _Open()


@contextmanager
def batch_held(owner: object, said: Said) -> Iterator[None]:
    """While open, the calls of this context find `said` by `batch_of(owner)`."""
    keep_graph_order()
    with _held(f"batch{id(owner)}", held := _Held(said), held):
        yield


@contextmanager
def observed(owner: object, observe: Callable[..., None]) -> Iterator[Callable[[], bool]]:
    """While open, `observe` is among the observers of this context's calls; yields whether a call is one of those."""
    name, held = f"observers{id(owner)}", _Held(observe)
    with _held(name, (*getattr(_NOTHING.now, name, ()), held), held):
        yield lambda: held.value is not None and held in getattr(_NOTHING.now, name, ())


@contextmanager
def _held(name: str, value: object, held: _Held) -> Iterator[None]:
    here = _Open()
    here.__dict__ |= _NOTHING.now.__dict__ | {name: value}
    token, before = _OPEN.set(here), _of_thread()
    _stash(_THREADS, here)
    try:
        yield
    finally:
        held.value = None
        if _of_thread() is here:
            _stash(_THREADS, before)
        with suppress(ValueError):  # closed in another context than opened: nothing is held there any more
            _OPEN.reset(token)


def _stash(key: str, value: object) -> None:
    """Keep `value` in this thread, which torch hands to the autograd engine's threads."""
    torch._C._stash_obj_in_tls(key, value)
    if _takes_its_callers_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@functools.cache
def _takes_its_callers_reference() -> bool:
    """Test for torch (2.11 is one) keeping an object without counting that, and freeing it later under its owners."""
    probe = object()
    counted = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(f"{_THREADS}.probe", probe)
    if sys.getrefcount(probe) > counted:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


def _of_thread() -> _Open:
    """The `_Open` set last on this thread; in threads of the autograd engine, on the one that called backward."""
    return torch._C._get_obj_in_tls(_THREADS) if torch._C._is_key_in_tls(_THREADS) else _NOTHING


def batch_of(owner: object) -> Said | None:
    """The settings of an open `acm.batch` for the model with that conversion; None where none is open."""
    here = _NOTHING.now
    if here is _NOTHING:
        if not recomputing():
            return None
        here = _of_thread()
    held = getattr(here, f"batch{id(owner)}", None)
    return None if held is None else held.value


@contextmanager
def called(owner: object, examples: Callable[[], int | None]) -> Iterator[None]:
    """While open, `examples()` is how many examples the running call of this context has, None if that is unknown."""
    with _held(f"call{id(owner)}", held := _Held(examples), held):
        yield


def examples_of(owner: object) -> int | None:
    """The number of examples in the running call of the model with that conversion; None where nothing open tells."""
    said = batch_of(owner)
    if said is not None and said.mask is not None:
        return said.mask.shape[0]
    if said is not None and said.knob is not None and said.each:
        return said.knob.shape[0]
    held, followed = getattr(_NOTHING.now, f"call{id(owner)}", None), getattr(owner, "padding", None)
    if held is not None and held.value is not None:
        return held.value()
    return None if followed is None else followed.examples()


def caller_of(owner: object) -> dict[str, int]:
    """The thread, and the number of the running forward of the model with that conversion, for `Choices`."""
    if torch.compiler.is_compiling():
        return {}
    return {"thread": get_ident(), "forward": getattr(getattr(owner, "padding", None), "forward", 0)}


def is_nothing_open() -> bool:
    """True if no `acm.batch` and no observer is open for calls of this context."""
    return _NOTHING.now is _NOTHING


def observers_of(owner: object) -> tuple[Callable[..., None], ...]:
    """The observers of this context's calls."""
    here = _NOTHING.now
    if here is _NOTHING:
        return ()
    return tuple(held.value for held in getattr(here, f"observers{id(owner)}", ()) if held.value is not None)


def only(when: Callable[[], bool], hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, for calls of which `when()` is true."""
    return lambda *args: hook(*args) if when() else None


def keep_graph_order() -> None:
    """Let Dynamo search for the graph that fits a call in the order in which they were made, in this process.

    Else it moves the one that fits to the front while other threads look, which then miss theirs and compile it again.
    """
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]  # in no stub


def recomputing() -> bool:
    """True in a checkpoint's recomputation, a forward that the autograd engine runs."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def is_freezing() -> bool:
    """True while a graph is made whose parameters and buffers Inductor will make constants of (its freezing)."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled() and _inductor_freezes()


DENSE_PREFIXES = {"cuda"}
"""Types of device on which graphs run dense products of the first learners where bounds leave one k to all tokens."""


def runs_prefixes(device: torch.device) -> bool:
    """True if the graph being made is such a one: not to be exported, to follow any bounds, nor under autocast."""
    return device.type in DENSE_PREFIXES and autocast_type(device) is None and not _is_exporting()


def _inductor_freezes() -> bool:
    from torch._inductor import config  # there already when this is traced

    return config.freezing


def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


# Read while a graph is made and not guarded: the setting is the thread's own, so that a guard on it, made where
# somebody had set it, would fail in every other thread and make a graph a call. Of exports torch 2.11 says, once its
# own function is traced, that every graph is one.
for _read in (_inductor_freezes, _is_exporting):
    setattr(_read, "_dynamo_marked_constant", True)  # noqa: B010


def transforms() -> tuple[bool, bool]:
    """Presence of vmap among the `torch.func` transforms that call, and of any other transform.

    Alone it takes the operator, whose rule makes one call of all copies; with others it needs plain operations.
    """
    levels = torch._C._functorch.get_interpreter_stack()
    if not levels:
        return False, False
    kinds = {level.key() for level in levels}
    vmap = torch._C._functorch.TransformType.Vmap
    return vmap in kinds, bool(kinds - {vmap})


def fx_node(module: nn.Module, traced: Proxy, *others: Any) -> Any:
    """A call of `module`, a leaf, in the graph that `torch.fx` makes by a symbolic trace."""
    tracer: Any = traced.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (traced, *others), {})


def is_plain_call(x: Tensor) -> bool:
    """True if an eager call is not mapped, pushed forward or converted, and nobody sees its operations."""
    if forward_ad._current_level >= 0 or autocast_type(x.device) is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    return not torch._C._functorch.get_interpreter_stack() and torch._C._get_tracing_state() is None
