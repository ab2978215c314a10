"""MACs that one call of a model executes, whatever it does inside, and the setting that a number of MACs pays for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from acm_compiler.passes.find.count_macs import Work
from acm_compiler.runtime.count_dense_work import kept_work_watched
from acm_compiler.sources.inputs import Inputs, call_model


def macs_of_call(model: nn.Module, inputs: Inputs) -> int:
    """All multiply-adds of one call, counted as it runs."""
    total = 0

    def add(works: Mapping[Any, list[Work]]) -> None:
        nonlocal total
        total += sum(work.macs for part in works.values() for work in part)

    with kept_work_watched(model, add, side=lambda: None, when=lambda: True):
        call_model(model, inputs)
    return total


def setting_within(cost: Callable[[float], float], most: float, *, cheap: float, dear: float, halvings: int) -> float:
    """The setting nearest to `dear` whose cost is at most `most`, by bisection; `cheap` where none between them is.

    cost: MACs of a setting, which rise from `cheap` to `dear`. The result is off by (dear - cheap) / 2**halvings.
    """
    for _ in range(halvings):
        middle = (cheap + dear) / 2
        cheap, dear = (middle, dear) if cost(middle) <= most else (cheap, middle)
    return cheap
