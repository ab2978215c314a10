"""MACs outside a model's ACMs, counted call by call while it runs: those of what stays dense.

Shapes: B examples, S the size of an axis of tokens.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from acm_compiler.acm import ACM
from acm_compiler.acm.context import only, recomputing
from acm_compiler.passes.capture.global_state import EAGER
from acm_compiler.passes.capture.op_names import name_of
from acm_compiler.passes.find.count_macs import Call, Work, does_macs, work_of
from acm_compiler.passes.rewrite.parameter_proxy import dense_arguments


@contextmanager
def kept_work_watched(
    model: nn.Module,
    done: Callable[[dict[Any, list[Work]]], None],
    *,
    side: Callable[[], Hashable],
    when: Callable[[], bool],
) -> Iterator[None]:
    """While open, `done` gets the work outside the ACMs of every call of `model`, or of a part of it, as it ends.

    Only calls of which `when()` is true are looked at. Works are told apart by what `side()` is meanwhile; those of
    equal sizes are added up. A part that is called within another one is counted with that. What a checkpoint computes
    again in the backward pass is left out, like a model's TorchScript modules' own work. Whatever the user compiled
    runs as the eager code that it was, in every thread.
    """
    here = _Here(side, done)
    handles = []
    try:
        for module in outside_acms(model):
            handles.append(module.register_forward_pre_hook(only(when, here.enter), prepend=True))
            handles.append(module.register_forward_hook(only(when, here.leave), always_call=True))
        with EAGER.held():
            yield
    finally:
        for handle in handles:
            handle.remove()
        here.close()  # torch calls no hooks after Ctrl-C


def real_work(
    works: Sequence[Work], lengths: Mapping[int, Tensor | None], *, batch: int, others_real: bool = False
) -> Tensor:
    """MACs of `works` for each of `batch` examples without what was done for padding, float64 [B].

    lengths: for axes of tokens by their size, what part of them is real, [B], or None where all is. Rows count by the
    axis whose size is nearest, rows of one per example in full; products of two values by each of their sizes that is
    one of these, or by the first axis that has padding. others_real: what has none of these sizes counts in full, as
    work on images of any size.
    """
    ones = torch.ones(batch, dtype=torch.float64)
    real = {size: ones if part is None else part for size, part in lengths.items()}
    known = (part for part in lengths.values() if part is not None and not others_real)
    padded = next(known, ones)
    total = torch.zeros(batch, dtype=torch.float64)
    for work in works:
        total += work.macs / batch * _real_share(work, {1: ones} | real, padded, batch, exactly=others_real)
    return total


def _real_share(work: Work, real: Mapping[int, Tensor], padded: Tensor, batch: int, *, exactly: bool) -> Tensor:
    """Share of a work that is for real tokens, [B]."""
    if work.rows:
        rows = work.rows / batch
        near = [size for size in real if (size == rows if exactly else (size > 1) == (rows > 1))]
        return real[min(near, key=lambda size: abs(math.log(size / rows)))] if near else padded
    known = [real[size] for size in work.lengths if size in real][:2]
    return math.prod(known[1:], start=known[0]) if known else padded


class _Here(threading.local):
    """Depth of one thread's calls: parts deep in the model, and in ACMs; `opened` is what counts meanwhile."""

    depth = 0
    inside_acms = 0
    opened: _Counting | None = None

    def __init__(self, side: Callable[[], Hashable], done: Callable[[dict[Any, list[Work]]], None]) -> None:
        self.side, self.done = side, done

    def enter(self, module: nn.Module, args: Any) -> None:
        """A part is called: count from the outermost one on."""
        if isinstance(module, ACM):
            self.inside_acms += 1
        elif self.depth or not recomputing():
            if not self.depth:
                EAGER.force()
                self.opened = _Counting(self).__enter__()
            self.depth += 1

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """A part has run."""
        if isinstance(module, ACM):
            self.inside_acms -= 1
        elif self.depth:
            self.depth -= 1
            if not self.depth:
                self.close()

    def close(self) -> None:
        """Stop counting, if anything counts, and hand over the works."""
        if self.opened is not None:
            counting, self.opened = self.opened, None
            counting.__exit__(None, None, None)
            self.done(counting.works())


class _Counting(TorchFunctionMode):
    """Adds up the work of every torch call but those of ACMs."""

    def __init__(self, here: _Here) -> None:
        super().__init__()
        self._here = here
        self._macs: Counter[tuple[Hashable, int, tuple[int, ...]]] = Counter()

    def works(self) -> dict[Any, list[Work]]:
        """All work so far by sides, equal sizes together."""
        works: dict[Any, list[Work]] = {}
        for (side, rows, lengths), macs in self._macs.items():
            works.setdefault(side, []).append(Work(macs=macs, rows=rows, lengths=lengths))
        return works

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._here.inside_acms and does_macs(name_of(func)):
            self._count(name_of(func), args, kwargs, result)
        return result

    def _count(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        dense = dense_arguments(args, kwargs)
        if dense is not None:
            shape = tuple(result.shape) if isinstance(result, Tensor) else ()
            for work in work_of(Call(name=name, args=dense[0], kwargs=dense[1], shape=shape)):
                self._macs[self._here.side(), work.rows, work.lengths] += work.macs


def outside_acms(model: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """The modules of the model, each once: ACMs, but nothing inside them."""
    seen = set() if seen is None else seen
    if model not in seen and not isinstance(model, torch.jit.ScriptModule):
        seen.add(model)
        yield model
        for part in () if isinstance(model, ACM) else model.children():
            yield from outside_acms(part, seen)
