"""Measuring which knob reaches which budget, on the converted model's own forwards (docs/semantics.md, Budgets)."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from acm_compiler.acm.intact import refuse_empty
from acm_compiler.errors import DataError, counted
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, Rewritten, rewritten
from acm_compiler.progress import Progress
from acm_compiler.runtime.budgets import NEAR
from acm_compiler.runtime.control import refuse_unfitted
from acm_compiler.runtime.trials import Probe, Trials, corners, expected_between
from acm_compiler.sources.inputs import Example, in_mode

_LOG = logging.getLogger(__name__)
# measured beside whatever budgets the caller names: those that are asked for most are met best
GRID = (0.1, 0.25, 0.5, 0.75)
# rows that nobody asked for only have to be somewhere near: a row says what share it reached
_NEAR = 0.006
# a wider gap between two rows that the search could not halve is a jump: no knob leads into it
_JUMP = 0.02
# budgets between two measured rows are reached by what both expect of them, in straight pieces that miss it by _CLOSE,
# if they differ by no more than _APART at any knob; else by one straight line that is expected to miss by no more
_APART, _CLOSE = 0.008, 0.004
# neither is met nearer than twice the standard error of other data's shares, up to these
_NEAR_AT_MOST, _APART_AT_MOST = 0.01, 0.02
# a search ends after so many probes; the first keeps this far from its neighbours, each later one four times as far
_STEPS, _MARGIN = 14, 1e-4


def measure_budgets(
    model: nn.Module,
    batches: Iterable[Example],
    *,
    budgets: Sequence[float] = (),
    k_lo: int = 0,
    progress: Progress | None = None,
) -> BudgetTable:
    """Find the knob of each budget by trial forwards and keep the table in the model's conversion.

    batches: (inputs, mask or None) pairs, run in eval mode; a few hundred examples are enough. All are run with the
    first two knobs; with others, of many, as many as tell the share of all to a standard error of .0015. k_lo: the
    lowest k of every row; a site's own k_min holds where it is above. The mode and the choices of the model are
    restored, and a table from before stays where this raises: SitesNotFitted where learners are missing,
    TrainingFailed where gates score a real token nan or infinity.
    """
    found = rewritten(model)
    refuse_unfitted(found, "measuring budgets")
    return fill_table(found, batches, budgets=budgets, k_lo=k_lo, progress=progress)


def fill_table(
    found: Rewritten, batches: Iterable[Example], *, budgets: Sequence[float], k_lo: int, progress: Progress | None
) -> BudgetTable:
    """`measure_budgets` of a model whose ACMs are known, and have learners."""
    if not (examples := list(batches)):
        raise DataError("batches must hold at least one example, got none", fix="a generator can be read only once")
    progress = progress or Progress("budgets", shown=False)
    trials = Trials(found, examples, k_lo)
    with undisturbed(found):
        progress.part("batch", 2 * len(examples))
        search = _Search(trials, progress)
        progress.finish(f"fewest and all learners run on {counted(trials.count, 'example')}")
        most, least = (row.share for row in search.rows())
        exactly = dict.fromkeys(budgets, NEAR) | {least + NEAR: NEAR / 2}
        # those in the middle first: each is looked for between the ones before it
        wanted = sorted((dict.fromkeys(GRID, _NEAR) | exactly).items(), key=lambda row: (-row[1], abs(row[0] - 0.5)))
        wanted = [(target, within) for target, within in wanted if least < target < most]
        progress.part("budget", len(wanted))
        for target, within in wanted:
            search.bisect(target, within)
            progress.advance(f"{target:.3f}")
        search.fill()
        jumps = search.jumps()
    rule = next(iter(found.acms.values())).gate.rule
    table = BudgetTable(rule=rule, points=search.points(), examples=trials.count, jumps=jumps)
    if jumps:
        _LOG.info("shares that no setting reaches follow %s", ", ".join(f"{share:.3f}" for share in jumps))
    found.owner.table = table
    measured = f"measured on {counted(table.examples, 'example')}"
    progress.finish(f"budget table {table.points[0].share:.3f} to 1, {measured}")
    return table


class _Search:
    """The rows of one table; the share falls with the knob.

    probes: rows that forwards ran, by knob. expected: shares of knobs between them that none ran. missed: targets that
    no probe came near.
    """

    def __init__(self, trials: Trials, progress: Progress) -> None:
        self.trials = trials
        self.probes = {probe.knob: probe for probe in trials.extremes(progress.advance)}
        self.expected: dict[float, float] = {}
        self.missed: list[float] = []

    def bisect(self, target: float, within: float) -> None:
        """Add probes until one lies `within` of `target` or the steps are used up.

        Between the knobs -1, of share .9, and 4, of share .3, a target of .5 is tried at 2.3, where a straight line
        crosses it, and next in the middle of the knobs around it.
        """
        for step in range(_STEPS):
            rows = self.rows()
            if min(abs(row.share - target) for row in rows) <= max(within, self._unsure(_NEAR_AT_MOST)):
                return
            right = bisect_left([-row.share for row in rows], -target)
            if right in (0, len(rows)):
                return
            low, high = rows[right - 1], rows[right]
            knobs, shares, _ = expected_between(low, high)
            guess = float(np.interp(-target, -shares, knobs))
            # where scores do not tell, each probe leaves more of the gap behind it
            margin = min(_MARGIN * 4**step, (high.knob - low.knob) / 2)
            knob = min(max(guess, low.knob + margin), high.knob - margin)
            if knob not in self.probes:
                self.probes[knob] = self.trials.at(knob)
        self.missed.append(target)

    def _unsure(self, most: float) -> float:
        """Twice the standard error of the shares of other data, or `most` where that is less."""
        return min(2 * self.trials.error, most)

    def rows(self) -> list[Probe]:
        """The probes, by rising knob."""
        return [self.probes[knob] for knob in sorted(self.probes)]

    def fill(self) -> None:
        """Add rows until a straight line from row to row is near enough, but for gaps that no knob leads into.

        They are read from recorded scores where these tell enough, and probed where they do not.
        """
        for _ in range(_STEPS):
            unknown = [gap for low, high in pairwise(self.rows()) if (gap := self._fill(low, high)) is not None]
            if not unknown:
                return
            for target, within in unknown:
                self.bisect(target, within)

    def _fill(self, low: Probe, high: Probe) -> tuple[float, float] | None:
        """Add the rows expected between two neighbouring probes; None where that, or a straight line, is enough.

        Where they expect different things of the knobs between them, or scores have led to nothing before: the share at
        which a straight line misses most, and how near it is to be met.
        """
        if any(high.share < target < low.share for target in self.missed):
            return None
        knobs, shares, apart = expected_between(low, high)
        if apart <= max(_APART, self._unsure(_APART_AT_MOST)) and not self.missed:
            bends = corners(knobs, shares, _CLOSE)
            self.expected.update((float(knobs[bend]), float(shares[bend])) for bend in bends)
            return None
        if not (bends := corners(knobs, shares, _APART)):
            return None
        spent = low.share - high.share
        return float(shares[bends[0]].clip(high.share + spent / 8, low.share - spent / 8)), spent / 10

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
        """All rows of the table: rising share, falling knob; of equal shares the knob nearest to the next row."""
        rows: list[BudgetPoint] = []
        shares = self.expected | {probe.knob: probe.share for probe in self.probes.values()}
        for knob in sorted(shares, reverse=True):
            if rows and shares[knob] < rows[-1].share:
                continue
            if rows and shares[knob] == rows[-1].share:
                rows.pop()
            rows.append(BudgetPoint(share=shares[knob], knob=knob, k_lo=self.trials.k_lo, measured=knob in self.probes))
        return tuple(rows)


@contextmanager
def undisturbed(found: Rewritten) -> Iterator[None]:
    """Eval mode without gradients; the mode, the choices, the budget and the cap set come back at the end."""
    refuse_empty(found.acms)
    owner, choices = found.owner, {acm: acm.run_time() for acm in found.acms.values()}
    budget, cap = owner.budget, owner.cap
    try:
        with torch.no_grad(), in_mode(found.model, training=False):
            yield
    finally:
        owner.budget, owner.cap = budget, cap
        for acm, values in choices.items():
            acm.set_run_time(values)
