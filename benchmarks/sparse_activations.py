"""Activation sparsity without training: linear layers that skip the inputs that matter least, token by token.

A layer y = W x reads the columns of W whose scores reach a threshold. TEAL (arXiv 2408.14690) scores an input by |x_i|,
WINA (arXiv 2505.19427) by |x_i| times the norm of column i. A threshold is a quantile of the layer's scores on
calibration tokens, and the same share of the inputs is kept in every layer: the papers also allot shares by layer, and
WINA rotates the model first, which is not done here. Unstructured masks save time for one token at a time at best.

Shapes: T tokens, D inputs of a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.evaluation.results import Interval
from acm_compiler.evaluation.statistics import Sample
from acm_compiler.inputs import call_model
from acm_compiler.planning.plan import Plan
from acm_compiler.tasks import Task

# tokens that a layer's thresholds are taken from, of so many batches: texts of one batch are of like length
_SAMPLE, _BATCHES = 512, 16


def _plain(weight_OD: Tensor) -> Tensor:
    return weight_OD.new_ones(weight_OD.shape[1])


def _column_norms(weight_OD: Tensor) -> Tensor:
    return weight_OD.norm(dim=0)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {"teal": _plain, "wina": _column_norms}


@dataclass(slots=True)
class _Layer:
    """One linear layer: what its inputs' magnitudes are weighted by, [D], and scores [T, D] seen while fitting."""

    linear: nn.Linear
    weight_D: Tensor
    seen: list[Tensor] = field(default_factory=list)
    thresholds: dict[float, float] = field(default_factory=dict)

    def scores(self, x: Tensor) -> Tensor:
        return x.abs() * self.weight_D

    def remember(self, x: Tensor) -> None:
        scores_TD = self.scores(x).flatten(0, -2)
        self.seen.append(scores_TD[:: max(1, len(scores_TD) * _BATCHES // _SAMPLE)])

    def fit(self, shares: Sequence[float]) -> None:
        ordered = torch.cat(self.seen).flatten().sort().values
        self.seen.clear()
        last = len(ordered) - 1
        self.thresholds = {share: float(ordered[round((1 - share) * last)]) for share in shares}


class SparseActivations:
    """The linear layers of a plan's sites in the dense model, with `method` teal or wina."""

    def __init__(self, dense: nn.Module, plan: Plan, method: str) -> None:
        linears = [part for site in plan.sites for part in dense.get_submodule(site.name).modules()]
        self.dense = dense
        self.layers = [
            _Layer(linear, WEIGHTS[method](linear.weight.detach()))
            for linear in linears
            if isinstance(linear, nn.Linear)
        ]
        self.real: Tensor | None = None
        self.kept_macs = self.all_macs = 0

    @torch.no_grad()
    def fit(self, batches: Iterable[Any], shares: Sequence[float]) -> None:
        """Take thresholds from the first batches (inputs, mask of real tokens)."""
        with self._hooked(lambda layer, x: layer.remember(x[self._mask_of(x)])):
            for inputs, self.real in islice(batches, _BATCHES):
                call_model(self.dense, inputs)
        for layer in self.layers:
            layer.fit(shares)

    @contextlib.contextmanager
    def at(self, share: float) -> Iterator[None]:
        """Run at this share of the inputs, on average; `reached` is then the share of MACs at real tokens."""
        self.kept_macs = self.all_macs = 0
        with self._hooked(lambda layer, x: self._sparse(layer, x, share)):
            yield

    @property
    def reached(self) -> float:
        """Share of the layers' MACs that were executed at real tokens."""
        return self.kept_macs / self.all_macs

    def watched(self, batches: Iterable[Batch], task: Task) -> Iterator[Batch]:
        """The same batches; while one is out, its mask says which tokens count as executed."""
        for batch in batches:
            self.real = task.mask(batch)
            yield batch

    def _mask_of(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[:-1], dtype=torch.bool) if self.real is None else self.real

    def _sparse(self, layer: _Layer, x: Tensor, share: float) -> Tensor:
        keep = layer.scores(x) >= layer.thresholds[share]
        real, out = self._mask_of(x), layer.linear.out_features
        self.kept_macs += int(keep[real].sum()) * out
        self.all_macs += int(real.sum()) * x.shape[-1] * out
        return x * keep

    @contextlib.contextmanager
    def _hooked(self, change: Callable[[_Layer, Tensor], Tensor | None]) -> Iterator[None]:
        handles = [
            layer.linear.register_forward_pre_hook(lambda _, x, layer=layer: change(layer, x[0]))
            for layer in self.layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


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
    """Measure `methods` at `shares` on the batches of `judge`, with thresholds from those of `fit`."""
    part = 1 - plan.cost.fixed_macs / plan.model.dense_macs
    sample, dense_E = _scores(dense, judge(), task)
    for method in methods:
        sparse = SparseActivations(dense, plan, method)
        sparse.fit(((task.inputs(batch), task.mask(batch)) for batch in fit()), shares)
        for share in shares:
            with sparse.at(share):
                _, score_E = _scores(dense, sparse.watched(judge(), task), task)
            yield Rival(
                method=method,
                share=share,
                reached=sparse.reached,
                model_share=1 - part * (1 - sparse.reached),
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
