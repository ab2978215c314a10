"""Other ways to make a dense model cheaper, each on the same sites, batches and count of MACs as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.evaluation.results import Interval
from acm_compiler.evaluation.statistics import Sample
from acm_compiler.inputs import call_model
from acm_compiler.planning.plan import Plan
from acm_compiler.tasks import Task
from benchmarks.low_rank import LowRank
from benchmarks.method import Method
from benchmarks.pruned_neurons import Cmoe, Flap
from benchmarks.sparse_activations import SparseActivations, column_norms, plain

METHODS: dict[str, Callable[[nn.Module, Plan], Method]] = {
    "teal": partial(SparseActivations, weights=plain),
    "wina": partial(SparseActivations, weights=column_norms),
    "svd": LowRank,
    "flap": Flap,
    "cmoe": Cmoe,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One method at one share: the share of the sites' MACs that ran, of the whole model's, and the metric."""

    method: str
    share: float
    reached: float
    model_share: float
    metric: float
    difference: Interval


@torch.no_grad()
def rivals(
    dense: nn.Module,
    plan: Plan,
    methods: Sequence[str],
    *,
    shares: Sequence[float],
    task: Task,
    fit: Callable[[], Iterable[Batch]],
    judge: Callable[[], Iterable[Batch]],
) -> Iterator[Rival]:
    """Measure `methods` at `shares` on the batches of `judge`, fitted on those of `fit`."""
    part = 1 - plan.cost.fixed_macs / plan.model.dense_macs
    sample, dense_E = _scores(dense, judge(), task)
    for method in methods:
        rival = METHODS[method](dense, plan)
        rival.fit(((task.inputs(batch), task.mask(batch)) for batch in fit()), shares)
        for share in shares:
            with rival.at(share):
                _, score_E = _scores(dense, rival.watched(judge(), task), task)
            yield Rival(
                method=method,
                share=share,
                reached=rival.reached,
                model_share=1 - part * (1 - rival.reached),
                metric=sample.value(score_E),
                difference=sample.difference(score_E, dense_E),
            )


def _scores(model: nn.Module, batches: Iterable[Batch], task: Task) -> tuple[Sample, Tensor]:
    """Units and sources of the examples, and the score of each."""
    units, groups, scores = [], [], []
    for batch in batches:
        units.append(task.units(batch))
        groups.append(batch["source"])
        scores.append(task.score(call_model(model, task.inputs(batch)), batch))
    return Sample(task=task, units_E=torch.cat(units), groups_E=torch.cat(groups)), torch.cat(scores)
