"""Measuring which knob reaches which budget, on the converted model's own forwards (docs/semantics.md, Budgets)."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM, tokens
from acm_compiler.acm.context import observed
from acm_compiler.errors import DataError, TrainingFailed
from acm_compiler.inputs import Inputs, call_model, in_mode
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, Conversion, Rewritten, rewritten
from acm_compiler.progress import Progress
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.budgets import NEAR
from acm_compiler.runtime.control import refuse_unfitted
from acm_compiler.runtime.usage import PADDING, Usage, record

_LOG = logging.getLogger(__name__)
# measured beside whatever budgets the caller names, so that interpolation between rows stays short
GRID = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)
# rows that nobody asked for only have to be somewhere near: a row says what share it reached
_NEAR = 0.006
# a wider gap between two rows that the search could not halve is a jump: no knob leads into it
_JUMP = 0.02
# rows further apart than this leave budgets between them to a straight line that may miss by more than .02
_WIDE = 0.05
_STEPS = 14
_STRONGEST_KNOB = 2.0**12

Example = tuple[Inputs, Tensor | None]


def measure_budgets(
    model: nn.Module,
    batches: Iterable[Example],
    *,
    budgets: Sequence[float] = (),
    k_lo: int = 0,
    progress: Progress | None = None,
) -> BudgetTable:
    """Find the knob of each budget by bisection and keep the table in the model's conversion.

    batches: (inputs, mask or None) pairs; all are run at every step, in eval mode, so a few hundred examples are
    enough. k_lo: the lowest k of every row; a site's own k_min holds where it is above. The mode and the choices of
    the model are restored, and a table from before stays where this raises: SitesNotFitted where learners are missing,
    TrainingFailed where gates score a real token nan or infinity.
    """
    found = rewritten(model)
    refuse_unfitted(found, "measuring budgets")
    examples = list(batches)
    if not examples:
        raise DataError("no examples to measure budgets on")
    progress = progress or Progress("budgets", shown=False)
    search = _Search(found, examples, k_lo)
    with undisturbed(model):
        least, most = search.push(1.0), search.push(-1.0)
        exactly = {target: NEAR for target in (least + NEAR, *budgets, most - NEAR)}
        wanted = sorted((dict.fromkeys(GRID, _NEAR) | exactly).items(), key=lambda row: (-row[1], row[0]))
        wanted = [(target, within) for target, within in wanted if least < target < most]
        progress.part("budget", len(wanted))
        for target, within in wanted:
            search.bisect(target, within)
            progress.advance(f"{target:.3f}")
        search.fill()
        jumps = search.jumps()
    rule = next(iter(found.acms.values())).gate.rule
    table = BudgetTable(rule=rule, points=search.points(), examples=search.count, jumps=jumps)
    if jumps:
        _LOG.info("shares that no setting reaches follow %s", ", ".join(f"{share:.3f}" for share in jumps))
    found.owner.table = table
    return table


class _Search:
    """Probes of one model, each a knob and the share of learner MACs that it reaches; the share falls with the knob."""

    def __init__(self, found: Rewritten, examples: list[Example], k_lo: int) -> None:
        self.found, self.examples, self.k_lo = found, examples, k_lo
        self.device = next(iter(found.acms.values())).k_lo.device
        self.probes: dict[float, float] = {}
        self.missed: list[float] = []
        self.count = 0

    def probe(self, knob: float) -> float:
        """The share reached with `knob`: the mean over examples of their shares, padding left out."""
        if knob not in self.probes:
            for acm in self.found.acms.values():
                acm.set_choices(knob=knob, k_lo=self.k_lo, k_hi=acm.count)
            shares = torch.cat([self._shares(number) for number in range(len(self.examples))])
            self.count = shares.numel()
            self.probes[knob] = _mean_over_ranks(shares, self.device)
            _LOG.debug("knob %+.3f: budget %.3f", knob, self.probes[knob])
        return self.probes[knob]

    def _shares(self, number: int) -> Tensor:
        """The shares of one batch's examples. TrainingFailed for scores that are not finite.

        They are looked at with the first knob alone: nan and infinity in data or weights show with every knob.
        """
        inputs, mask = self.examples[number]
        broken: dict[str, list[Tensor]] = {}
        watched = nullcontext() if self.probes else _scored(self.found.owner, broken)
        model = self.found.model
        with batch_context(model, mask=mask), record(model, macs=False) as usage, watched:
            call_model(model, inputs)
        _refuse_broken(broken, usage, f"batch {number + 1} of {len(self.examples)} to measure budgets on")
        return usage.real_shares

    def push(self, knob: float) -> float:
        """The share at the end of the knob's range: raised until every gate is at its bound, or for good.

        A few tokens that never run all learners are no reason to go on: budget 1 is set without a knob.
        """
        limit, near = (self.found.plan.cost.least_share(self.k_lo), 1e-6) if knob > 0 else (1.0, NEAR)
        while abs(self.probe(knob) - limit) > near and abs(knob) < _STRONGEST_KNOB:
            knob *= 4
        return self.probe(knob)

    def bisect(self, target: float, within: float) -> None:
        """Add probes until one lies `within` of `target` or the steps are used up.

        Between the knobs -1, of share .9, and 4, of share .3, a target of .5 is tried at 2.3, where a straight line
        crosses it, and next in the middle of the knobs around it.
        """
        for step in range(_STEPS):
            knobs = sorted(self.probes)
            shares = [self.probes[knob] for knob in knobs]
            if min(abs(share - target) for share in shares) <= within:
                return
            right = bisect_left([-share for share in shares], -target)
            if right in (0, len(knobs)):
                return
            # the middle, and by turns where a straight line would cross: halves the forwards
            place = 0.5 if step % 2 else (shares[right - 1] - target) / (shares[right - 1] - shares[right])
            self.probe(knobs[right - 1] + min(max(place, 0.1), 0.9) * (knobs[right] - knobs[right - 1]))
        self.missed.append(target)

    def fill(self) -> None:
        """Add probes until no two rows are far apart, but for gaps that no knob leads into."""
        for _ in range(_STEPS):
            wide = [(low.share, high.share) for low, high in pairwise(self.points()) if high.share - low.share > _WIDE]
            wide = [(low, high) for low, high in wide if not any(low < target < high for target in self.missed)]
            if not wide:
                return
            for low, high in wide:
                self.bisect((low + high) / 2, (high - low) / 4)

    def jumps(self) -> tuple[float, ...]:
        """The shares of the rows before gaps that no knob leads into.

        Where all tokens score alike they change from k = 1 to k = 2 at one knob: no knob leads to .40 between .25 and
        .50, and .25 is returned. Where a target was missed so, there may be more gaps: then all wide ones are searched.
        """
        searched: set[tuple[float, float]] = set()
        while True:
            wide = [(low.share, high.share) for low, high in pairwise(self.points()) if high.share - low.share > _JUMP]
            missed = {(low, high) for low, high in wide if any(low < target < high for target in self.missed)}
            unknown = set(wide) - missed - searched
            if not missed or not unknown:
                return tuple(low for low, _ in sorted(missed))
            for low, high in sorted(unknown):
                self.bisect((low + high) / 2, _NEAR)
            searched |= unknown

    def points(self) -> tuple[BudgetPoint, ...]:
        """The probes as table rows: rising share, falling knob; of equal shares the knob nearest to the next row."""
        rows: list[BudgetPoint] = []
        for knob in sorted(self.probes, reverse=True):
            share = self.probes[knob]
            if rows and share < rows[-1].share:
                continue
            if rows and share == rows[-1].share:
                rows.pop()
            rows.append(BudgetPoint(share=share, knob=knob, k_lo=self.k_lo))
        return tuple(rows)


def _scored(owner: Conversion, broken: dict[str, list[Tensor]]) -> AbstractContextManager[object]:
    """While open, each call of an ACM adds, by site, which tokens have scores that are not finite, [batch, tokens]."""

    def see(acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
        broken_T = ~acm.gate(x.reshape(-1, x.shape[-1])).isfinite().all(-1)
        broken.setdefault(acm.name, []).append(tokens.to_batch(broken_T, x.shape[:-1], acm.layout, site=acm.name))

    return observed(owner, see)


def _refuse_broken(broken: Mapping[str, list[Tensor]], usage: Usage, which: str) -> None:
    """TrainingFailed where the score of a real token is not finite; `which` batch it was."""
    for name, calls in broken.items():
        real_BS = usage.k[name] != PADDING
        count = int((torch.cat(calls, dim=1) & real_BS).sum())
        if count:
            raise TrainingFailed(
                "the gate's scores are not finite, so what it chooses is chance",
                where=name,
                found=f"nan or infinity at {count:,} of {int(real_BS.sum()):,} tokens of {which}",
                fix="look for such values in the data and in the model's weights, or run it in a wider floating type",
            )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the mode, the choices, the budget and the cap set come back at the end."""
    found = rewritten(model)
    owner, choices = found.owner, {acm: acm.run_time() for acm in found.acms.values()}
    budget, cap = owner.budget, owner.cap
    try:
        with torch.no_grad(), in_mode(model, training=False):
            yield
    finally:
        owner.budget, owner.cap = budget, cap
        for acm, values in choices.items():
            acm.set_run_time(values)


def _mean_over_ranks(shares: Tensor, device: torch.device) -> float:
    """The mean over all processes, which talk to each other by tensors on `device`: NCCL knows no others."""
    total = torch.stack([shares.sum(), shares.new_tensor(float(shares.numel()))])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        total = total.to(device)
        torch.distributed.all_reduce(total)
    if not total[1]:
        raise DataError("the examples to measure budgets on hold no real token", fix="give batches that are not empty")
    return float(total[0] / total[1])
