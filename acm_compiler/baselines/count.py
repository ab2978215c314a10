"""MACs that one call of a model executes, whatever it does inside."""

from __future__ import annotations

from collections.abc import Mapping
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
