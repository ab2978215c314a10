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

from acm_compiler.inputs import call_model
from acm_compiler.planning.plan import Plan
from benchmarks.method import Method

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


class SparseActivations(Method):
    """The linear layers of a plan's sites in the dense model, with `method` teal or wina."""

    def __init__(self, dense: nn.Module, plan: Plan, method: str) -> None:
        super().__init__(dense, plan)
        self.layers = [_Layer(linear, WEIGHTS[method](linear.weight.detach())) for linear in self.linears]

    @torch.no_grad()
    def fit(self, batches: Iterable[Any], shares: Sequence[float]) -> None:
        """Take thresholds from the first batches (inputs, mask of real tokens)."""
        with self._hooked(lambda layer, x: layer.remember(x[self.mask_of(x)])):
            for inputs, self.real in islice(batches, _BATCHES):
                call_model(self.dense, inputs)
        for layer in self.layers:
            layer.fit(shares)

    @contextlib.contextmanager
    def at(self, share: float) -> Iterator[None]:
        """Run at this share of the inputs, on average."""
        self.kept_macs = self.all_macs = 0
        with self._hooked(lambda layer, x: self._sparse(layer, x, share)):
            yield

    def _sparse(self, layer: _Layer, x: Tensor, share: float) -> Tensor:
        keep = layer.scores(x) >= layer.thresholds[share]
        real, out = self.mask_of(x), layer.linear.out_features
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
