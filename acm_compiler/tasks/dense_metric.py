"""The metric of a model before conversion, and what a recipe expects of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from acm_compiler.data import Batch
from acm_compiler.errors import UnexpectedMetric
from acm_compiler.inputs import call_model, in_mode
from acm_compiler.recipe.tasks import ExpectConfig
from acm_compiler.tasks import Task


def base_metric(model: nn.Module, batches: Iterable[Batch], task: Task) -> float:
    """The task's metric of a model without ACMs, over examples on its device; in eval mode, without gradients."""
    scores, units = [], []
    with torch.no_grad(), in_mode(model, training=False):
        for batch in batches:
            output = call_model(model, task.inputs(batch))
            scores.append(task.score(output, task.remember(output, batch)).cpu())
            units.append(task.units(batch).cpu())
    return task.value(torch.cat(scores), torch.cat(units))


def refuse_unexpected(found: float, expect: ExpectConfig, *, metric: str, where: str) -> None:
    """Refuse a model that does not reach what the recipe expects at `where`. UnexpectedMetric."""
    low, high = expect.range
    if not low <= found <= high:  # nan is none of them
        raise UnexpectedMetric(
            f"the model to convert does not reach the {metric} that the recipe expects",
            where=where,
            found=f"{found:.4g}",
            expected=expect,
            fix="check weights, data and task (vocabulary, letters, rates, classes); if this is as it should be, "
            "correct `expect:`, or leave it out with --set expect=null",
        )
