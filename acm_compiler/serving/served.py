"""One batch of requests through a model, at its budgets: examples in, what the task makes of the output out.

Also how much of the learners each batch ran, and how far that is from what the budget table promised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from acm_compiler.data.batch import Batch
from acm_compiler.errors import BudgetUnreachable, UsageError
from acm_compiler.passes.rewrite.conversion import BudgetTable, Rewritten
from acm_compiler.runtime.batch_context import batch
from acm_compiler.runtime.budgets import setting_of, share_within
from acm_compiler.runtime.control import spend
from acm_compiler.runtime.meter import TOLERANCE, Meter, drift_text
from acm_compiler.serving.batcher import Example
from acm_compiler.serving.readers import Reader
from acm_compiler.sources.inputs import call_model, fit_to
from acm_compiler.tasks import Task

_LOG = logging.getLogger(__name__)
_MEMORY = 0.999  # weight of all batches before, at each one
_ENOUGH = 100  # batches, before a drift is worth a warning
_AGAIN = (
    "a server with --recalibrate asked measures it again on POST /recalibrate, one with --recalibrate drift by itself"
)


class RecentUsage:
    """The last batch's share of learner MACs, and the mean distance of recent shares from those promised.

    Where that leaves the tolerance, the log says so, and `on_drift` is called: once, until `restart`.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.on_drift: Callable[[], None] | None = None
        self.begin()

    def begin(self) -> None:
        """Count from here on: what ran before was no request."""
        self._meter.reset()
        self._seen = self._meter.macs
        self.share: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forget what was promised, as where a table takes the place of another."""
        self._run = self._promised = self._full = 0.0
        self._batches, self._warned = 0, False

    @property
    def drift(self) -> float | None:
        """Share reached minus share promised, over recent batches; None before any."""
        return (self._run - self._promised) / self._full if self._full else None

    @property
    def tokens_by_k(self) -> dict[str, list[int]]:
        """Numbers of tokens that ran k = 0, 1, ..., N, by site."""
        return {name: counts.tolist() for name, counts in self._meter.k.items()}

    def add(self, promised: float | None) -> None:
        """Add what ran since the last call, a batch of one budget that promised this share; None: of several."""
        now = self._meter.macs
        run, full = now[0] - self._seen[0], now[1] - self._seen[1]
        self._seen = now
        if not full:
            return
        self.share = run / full
        if promised is None:
            return
        self._run, self._promised = _MEMORY * self._run + run, _MEMORY * self._promised + promised * full
        self._full, self._batches = _MEMORY * self._full + full, self._batches + 1
        if not self._warned and self._batches >= _ENOUGH and abs(self.drift or 0.0) > TOLERANCE:
            self._warned = True
            said = drift_text(self._run / self._full, self._promised / self._full)
            _LOG.warning(said if self.on_drift is not None else f"{said}; {_AGAIN}")
            if self.on_drift is not None:
                self.on_drift()


Kind = Literal["classify", "embed"]


@dataclass(kw_only=True)
class Served:
    """A model of some `kind`, called as `call`, with its task and what reads requests for it.

    One thread at a time may `run` it. `found` and `use`: its ACMs, and what they use; None for a model without any,
    which has no budgets. `classes`: their names by number. `seen` is called with the examples that have run.
    `skips_padding`: padding runs no learner, see `acm.batch`.
    """

    name: str
    kind: Kind
    model: nn.Module
    call: Any
    task: Task
    reader: Reader
    found: Rewritten | None
    classes: Mapping[int, str]
    use: RecentUsage | None = None
    seen: Callable[[Sequence[Example]], None] | None = None
    skips_padding: bool = False
    _promised: float | None = None
    _next_table: BudgetTable | None = None

    def run(self, examples: Sequence[Example], own: Sequence[float | None], budget: float) -> list[Tensor]:
        """The task's part of the output for each example, at its own budget or at `budget`; fp32 on the CPU."""
        found: dict[int, Tensor] = {}
        for numbers in self.reader.together(examples):
            given: Batch = fit_to(self.model, self.reader.collate([examples[number] for number in numbers]))
            answers = self._answers(given, [own[number] for number in numbers], budget)
            found |= zip(numbers, answers.float().cpu(), strict=True)
        if self.seen is not None:
            self.seen(examples)
        return [found[number] for number in range(len(examples))]

    @torch.no_grad()
    def _answers(self, given: Batch, own: Sequence[float | None], budget: float) -> Tensor:
        output = self._output(given, own, budget)
        logits = self.task.logits(output) if self.kind == "classify" else None
        return self.task.answer(output, self.task.mask(given)) if logits is None else logits

    def adopt(self, table: BudgetTable) -> None:
        """Put another budget table in place before the next batch; from any thread."""
        self._next_table = table

    def _spend(self, found: Rewritten, budget: float) -> float:
        """Set a budget, or the table's lowest above it, where it is not set yet; gives the share expected."""
        owner = found.owner
        if (table := self._next_table) is not None:
            owner.table, self._next_table, self._promised = table, None, None
            if self.use is not None:
                self.use.restart()
        wanted = max(budget, owner.table_min)
        if self._promised is None or owner.budget != wanted:
            self._promised = spend(found, wanted)
        return self._promised

    def share(self, budget: float | str, *, option: str | None = None) -> float:
        """The budget of a request, or of an option, as a share of learner MACs.

        UsageError and BudgetUnreachable for what it cannot be.
        """
        if self.found is None:
            raise UsageError("this model has no budget: it holds no ACMs", fix="leave the budget out")
        owner = self.found.owner
        try:
            setting_of(owner, budget)
            share = share_within(budget, owner.plan, low=owner.table_min)
        except (UsageError, BudgetUnreachable) as error:
            kind = UsageError if isinstance(error, UsageError) else BudgetUnreachable
            low = f"{owner.table_min:.3g}"
            more = f", or a lowest and a highest: {low}:1" if option else "; without a budget the server chooses"
            fix, where = f"give {low} to 1, '60%' or '11GMACs'{more}", option or "budget"
            raise kind(error.what, where=where, found=error.found, expected=error.expected, fix=fix) from error
        assert share is not None  # or it would have been refused
        return share

    def _output(self, given: Batch, own: Sequence[float | None], budget: float) -> Any:
        inputs, mask = self.task.inputs(given), self.task.mask(given)
        if mask is not None and bool(mask.all()):
            mask = None  # which costs a little at every site
        if self.found is None:
            return call_model(self.call, inputs)
        promised: float | None = self._spend(self.found, budget)
        each = None
        if any(share is not None for share in own):
            each, promised = [budget if share is None else share for share in own], None
        if each is None and mask is None:
            output = call_model(self.call, inputs)
        else:
            skip = self.skips_padding and mask is not None
            with batch(self.model, mask=mask, skip_padding=skip, budgets=each):
                output = call_model(self.call, inputs)
        if self.use is not None:
            self.use.add(promised)
        return output
