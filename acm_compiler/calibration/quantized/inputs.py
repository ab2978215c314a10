"""The tokens that sites, and linears around them, are given while a rewritten model runs on calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.context import observed
from acm_compiler.calibration.answer import mask_in, run
from acm_compiler.calibration.examples import Examples
from acm_compiler.errors import DataError, TrainingFailed
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.progress import Progress
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.control import highest_k, spend
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.sources.inputs import Example

# batches run at these budgets in turn, so that learners are seen by the tokens that run them
BUDGETS = (1.0, 0.75, 0.6, 0.4)


@dataclass(slots=True)
class Inputs:
    """Real tokens x [T, D] of one site or linear, and how many learners ran of each, k [T]; at most `wanted`.

    They are kept in bfloat16, which is enough for sums over all of them.
    """

    wanted: int
    _x: list[Tensor] = field(default_factory=list)
    _k: list[Tensor] = field(default_factory=list)
    seen: int = 0

    def add(self, x_TD: Tensor, k_T: Tensor) -> None:
        """Take in the tokens of one call."""
        left = max(0, self.wanted - self.seen)
        self._x.append(x_TD[:left].bfloat16())
        self._k.append(k_T[:left].to(torch.int16))
        self.seen += len(x_TD)

    @property
    def x(self) -> Tensor:
        """The tokens, float32 [T, D]."""
        return torch.cat(self._x).float()

    @property
    def k(self) -> Tensor:
        """The learners that ran of each, int16 [T]."""
        return torch.cat(self._k)


def read_inputs(
    found: Rewritten, examples: Iterable[Example], linears: Mapping[str, nn.Module], *, count: int, progress: Progress
) -> dict[str, Inputs]:
    """Run the model at several budgets in turn until every site has seen `count` real tokens; by name.

    DataError for no batches, and a site that no real token reached; of `linears` those that none did are left out.
    TrainingFailed for values that are not finite.
    """
    inputs = {name: Inputs(count) for name in (*found.acms, *linears)}
    settings, batches = cycle(_settings(found)), Examples(examples)
    progress.part("token", count)
    with undisturbed(found), _watched(found, inputs, linears) as begin:
        for example in batches.read(lambda: _least(found, inputs) >= count):
            next(settings)()
            begin(mask_in(found.model, example))
            with batch_context(found.model, mask=example[1]):
                run(found, example[0])
            progress.advance(to=min(count, _least(found, inputs)))
    for name in found.acms:
        if not inputs[name].seen:
            raise DataError(
                "this site never saw a token of the calibration data",
                where=name,
                fix="give batches that use this part of the model and are not padding alone",
            )
    inputs = {name: site for name, site in inputs.items() if site.seen}
    for name, site in inputs.items():
        if not all(part.isfinite().all() for part in site._x):
            raise TrainingFailed(
                "the model computed values that are not finite",
                where=name,
                fix="look for such values in its weights and in the data, or run it in a wider floating type",
            )
    return inputs


def _least(found: Rewritten, inputs: Mapping[str, Inputs]) -> int:
    """Tokens that the site with the fewest has seen."""
    return min(inputs[name].seen for name in found.acms)


def _settings(found: Rewritten) -> list[Callable[[], object]]:
    """Setters of each budget: of the gates where budgets were measured, else of a fixed k."""
    owner = found.owner
    if owner.table is not None:
        return [partial(spend, found, budget) for budget in BUDGETS if budget >= owner.table_min]
    return [partial(_fix, found, share) for share in BUDGETS]


def _fix(found: Rewritten, share: float) -> None:
    for acm in found.acms.values():
        k = highest_k(acm.count, share)
        acm.set_choices(knob=0.0, k_lo=k, k_hi=k)


class _Watch:
    """Hooks that hand the real tokens of every call to `inputs`."""

    def __init__(self, inputs: Mapping[str, Inputs]) -> None:
        self.inputs = inputs
        self.mask_BS: Tensor | None = None
        self._last: tuple[Any, Tensor] | None = None

    def begin(self, mask_BS: Tensor | None) -> None:
        """Expect a batch with this mask."""
        self.mask_BS, self._last = mask_BS, None

    def see(self, acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
        """One call of a site, as observers are told of it."""
        x_BSD = acm.by_example(x.reshape(-1, x.shape[-1]), x.shape[:-1])
        real = self._real(k_BS.shape) if mask_BS is None else mask_BS.to(x.device)
        self.inputs[acm.name].add(_copied(x_BSD[real]), k_BS[real].flatten())

    def see_linear(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        """One call of a linear; neighbours that are given the same tensor, such as q, k and v, share what is kept."""
        if self._last is None or self._last[0] is not args[0]:
            x = args[0]
            self._last = x, _copied(x[self._real(x.shape[:-1])])
        x_TD = self._last[1]
        self.inputs[name].add(x_TD, x_TD.new_ones(len(x_TD), dtype=torch.int16))

    def _real(self, shape: torch.Size) -> Any:
        """Index of the real tokens of so many; all where the batch's mask speaks of others."""
        fits = self.mask_BS is not None and self.mask_BS.shape == shape
        return self.mask_BS if fits else ...


def _copied(x: Tensor) -> Tensor:
    """Tokens [T, D] that the model cannot overwrite."""
    return x.detach().flatten(0, -2).to(torch.bfloat16, copy=True)


@contextmanager
def _watched(
    found: Rewritten, inputs: Mapping[str, Inputs], linears: Mapping[str, nn.Module]
) -> Iterator[Callable[[Tensor | None], None]]:
    """While open, `inputs` get the tokens of every call; yields what is told of each batch's mask."""
    watch = _Watch(inputs)
    with observed(found.owner, watch.see), ExitStack() as hooks:
        for name, linear in linears.items():
            hooks.callback(linear.register_forward_pre_hook(partial(watch.see_linear, name)).remove)
        yield watch.begin
