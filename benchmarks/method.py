"""A way to run fewer MACs in the linear layers of a plan's sites of the dense model, without training."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.inputs import call_model
from acm_compiler.tasks import Task

# batches that a method is fitted on: texts of one batch are of like length
BATCHES = 16


class Method(ABC):
    """Changes the inputs of some linear layers while they run, and counts the MACs of the sites at real tokens."""

    def __init__(self, dense: nn.Module) -> None:
        self.dense = dense
        self.real: Tensor | None = None
        self.kept_macs = self.all_macs = 0.0

    @property
    @abstractmethod
    def linears(self) -> Sequence[nn.Linear]:
        """The layers whose inputs are looked at, and changed."""

    @abstractmethod
    def look(self, place: int, x_TD: Tensor) -> None:
        """Keep what fitting needs of the real inputs of layer `place`."""

    @abstractmethod
    def settle(self, shares: Sequence[float]) -> None:
        """Fit to what was kept, for each of `shares` of the MACs."""

    @abstractmethod
    def change(self, place: int, x: Tensor, share: float) -> Tensor:
        """The input [..., D] with which layer `place` gives what the method computes; counts the MACs."""

    @torch.no_grad()
    def fit(self, batches: Iterable[Any], shares: Sequence[float]) -> None:
        """Fit to the first batches (inputs, mask of real tokens)."""
        with self._hooked(lambda place, x: self.look(place, x[self.mask_of(x)])):
            for inputs, self.real in islice(batches, BATCHES):
                call_model(self.dense, inputs)
        self.settle(shares)

    @contextlib.contextmanager
    def at(self, share: float) -> Iterator[None]:
        """Run at this share of the MACs, on average; `reached` is then the one at real tokens."""
        self.kept_macs = self.all_macs = 0.0
        with self._hooked(lambda place, x: self.change(place, x, share)):
            yield

    @property
    def reached(self) -> float:
        """Share of the sites' MACs that were executed at real tokens."""
        return self.kept_macs / self.all_macs

    def watched(self, batches: Iterable[Batch], task: Task) -> Iterator[Batch]:
        """The same batches; while one is out, its mask says which tokens count as executed."""
        for batch in batches:
            self.real = task.mask(batch)
            yield batch

    def mask_of(self, x: Tensor) -> Tensor:
        """Real tokens of an input [..., D]."""
        return torch.ones(x.shape[:-1], dtype=torch.bool) if self.real is None else self.real

    @contextlib.contextmanager
    def _hooked(self, change: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
        handles = [
            linear.register_forward_pre_hook(lambda _, x, place=place: change(place, x[0]))
            for place, linear in enumerate(self.linears)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
