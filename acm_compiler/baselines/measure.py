"""A method's scores and MACs on the held-out examples, and the rows that all methods' scores make together.

Shapes: E examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from acm_compiler.baselines.method import Method
from acm_compiler.data.batch import size_of
from acm_compiler.evaluation.comparison import Cost, MethodResult, Row
from acm_compiler.evaluation.statistics import Sample, Spent, against_fixed
from acm_compiler.progress import Progress
from acm_compiler.sources.inputs import call_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of one method: for each budget a score and MACs per example, [E], and seconds per example.

    units_E, groups_E: what each example counts for, and its source. unreached: budgets that the method could not be set
    to once it was fitted. steps: those that a model was trained by.
    """

    units_E: Tensor
    groups_E: Tensor
    scores: dict[float, Tensor]
    macs: dict[float, Tensor]
    seconds: dict[float, float] = field(default_factory=dict)
    unreached: tuple[float, ...] = ()
    steps: int = 0


def measure(method: Method, budgets: Sequence[float], progress: Progress) -> Measured:
    """Run a fitted method at every budget that it reaches, in one pass over the held-out examples."""
    task, dense = method.subject.task, method.subject.dense
    reached = [budget for budget in budgets if method.reaches(budget)]
    scores: dict[float, list[Tensor]] = {budget: [] for budget in reached}
    macs: dict[float, list[Tensor]] = {budget: [] for budget in reached}
    seconds = dict.fromkeys(reached, 0.0)
    units: list[Tensor] = []
    groups: list[Tensor] = []
    for batch in progress.fed(method.subject.held_out()):
        if task.needs_dense:
            with torch.no_grad():
                batch = task.remember(call_model(dense, task.inputs(batch)), batch)
        for budget in reached:
            began = monotonic()
            ran = method.run(batch, budget)
            seconds[budget] += monotonic() - began
            scores[budget].append(ran.score_B)
            macs[budget].append(ran.macs_B)
        first = sum(map(len, groups))
        groups.append(batch["source"].cpu() if "source" in batch else torch.arange(first, first + size_of(batch)))
        units.append(task.units(batch).cpu())
        progress.advance(examples=size_of(batch))
    groups_E = torch.cat(groups)
    return Measured(
        units_E=torch.cat(units),
        groups_E=groups_E,
        scores={budget: torch.cat(parts) for budget, parts in scores.items()},
        macs={budget: torch.cat(parts) for budget, parts in macs.items()},
        seconds={budget: spent / len(groups_E) for budget, spent in seconds.items()},
        unreached=tuple(budget for budget in budgets if budget not in reached),
    )


def result_of(
    name: str, method: type[Method], found: Measured, *, sample: Sample, dense: Measured, ours: Measured | None
) -> MethodResult:
    """The rows of one method, beside the dense model and, at equal cost, beside ours."""
    dense_macs, dense_E = float(dense.macs[1.0].nanmean()), dense.scores[1.0]
    controls = [] if ours is None else [Spent(share=_mean(ours, b), score_E=ours.scores[b]) for b in ours.scores]
    rows = []
    for budget, score_E in found.scores.items():
        here = Spent(share=_mean(found, budget), score_E=score_E)
        rows.append(
            Row(
                budget=budget,
                cost=_cost(found.macs[budget], dense_macs),
                metric=sample.value(score_E),
                metric_error=sample.error(score_E),
                difference=sample.difference(score_E, dense_E),
                to_acm=None if found is ours else against_fixed(here, controls, sample),
                seconds=found.seconds.get(budget),
            )
        )
    return MethodResult(
        name=name,
        title=method.title,
        masks=method.masks,
        rows=tuple(rows),
        unreached=found.unreached,
        steps=found.steps,
    )


def _mean(found: Measured, budget: float) -> float:
    return float(found.macs[budget].nanmean())


def _cost(macs_E: Tensor, dense_macs: float) -> Cost:
    low, high = torch.nanquantile(macs_E.double(), torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    mean = float(macs_E.double().nanmean())
    return Cost(share=mean / dense_macs, macs=mean, macs_p5=low, macs_p95=high)
