"""A rival of ACMs: a dense model made cheaper in the linear layers of a plan's sites.

Shapes: T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.inputs import call_model
from acm_compiler.planning.plan import Plan
from acm_compiler.tasks import Task

# batches that a method is fitted on: texts of one batch are of like length
BATCHES = 16


class Method(ABC):
    """One way to run the linear layers of a plan's sites at a share of their MACs; the dense model is left as it was.

    MACs are added up while the model runs, at real tokens alone.
    """

    def __init__(self, dense: nn.Module, plan: Plan) -> None:
        parts = [part for site in plan.sites for part in dense.get_submodule(site.name).modules()]
        self.dense = dense
        self.linears = [part for part in parts if isinstance(part, nn.Linear)]
        self.real: Tensor | None = None
        self.kept_macs = self.all_macs = 0

    @abstractmethod
    def fit(self, batches: Iterable[Any], shares: Sequence[float]) -> None:
        """Prepare `shares` from the first batches (inputs, mask of real tokens)."""

    @abstractmethod
    def at(self, share: float) -> AbstractContextManager[None]:
        """Run at this share of the MACs; `reached` is then the share that ran."""

    @property
    def reached(self) -> float:
        """Share of the layers' MACs that were executed at real tokens."""
        return self.kept_macs / self.all_macs

    def watched(self, batches: Iterable[Batch], task: Task) -> Iterator[Batch]:
        """The same batches; while one is out, its mask says which tokens count as executed."""
        for batch in batches:
            self.real = task.mask(batch)
            yield batch

    def mask_of(self, x: Tensor) -> Tensor:
        """The mask of real tokens among a layer's inputs."""
        return torch.ones(x.shape[:-1], dtype=torch.bool) if self.real is None else self.real


class ChangedInputs(Method):
    """A method that gives some linear layers other inputs than those that come."""

    @property
    def changed(self) -> Sequence[nn.Linear]:
        """The layers whose inputs are looked at, and changed."""
        return self.linears

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

    @contextmanager
    def at(self, share: float) -> Iterator[None]:
        """Run with changed inputs meanwhile."""
        self.kept_macs = self.all_macs = 0
        with self._hooked(lambda place, x: self.change(place, x, share)):
            yield

    @contextmanager
    def _hooked(self, change: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
        handles = [
            linear.register_forward_pre_hook(lambda _, x, place=place: change(place, x[0]))
            for place, linear in enumerate(self.changed)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
