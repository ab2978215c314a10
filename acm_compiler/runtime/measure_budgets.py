"""Measuring which knob reaches which budget, on the converted model's own forwards (docs/semantics.md, Budgets)."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM, tokens
from acm_compiler.acm.context import observed
from acm_compiler.errors import DataError
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, Rewritten, rewritten
from acm_compiler.passes.rewrite.offload import trim
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.progress import Progress
from acm_compiler.runtime import ranks
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.budgets import NEAR
from acm_compiler.runtime.control import refuse_unfitted
from acm_compiler.runtime.expected_share import (
    STRONGEST_KNOB,
    Part,
    Probe,
    Whole,
    corners,
    expected_between,
    quantiles,
    refuse_broken,
    turning_knobs,
)
from acm_compiler.runtime.usage import PADDING, recorded
from acm_compiler.sources.inputs import ForwardEnded, Inputs, call_model, in_mode

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
# so many knobs, the strongest and the weakest, are tried on all batches; the digits of a share that are no rounding
_WHOLE, _DIGITS = 2, 12
# a search ends after so many probes; the first keeps this far from its neighbours, each later one four times as far
_STEPS, _MARGIN = 14, 1e-4
# tokens of each site, in whole examples, whose scores say where to look next
_SCORED = 4096

Example = tuple[Inputs, Tensor | None]


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
    search = _Search(found, examples, k_lo)
    with undisturbed(found):
        least, most = search.probe(STRONGEST_KNOB), search.probe(-STRONGEST_KNOB)
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
        self.least = found.plan.cost.least_share(k_lo)
        self.probes: dict[float, Probe] = {}
        self.expected: dict[float, float] = {}
        self.missed: list[float] = []
        self.calls = defaultdict[int, list[int]](list)
        self.whole: Whole | None = None
        self.count = self.tokens = 0

    def probe(self, knob: float) -> float:
        """The share reached with `knob`: the mean over examples of their shares, padding left out."""
        if knob not in self.probes:
            for acm in self.found.acms.values():
                acm.set_choices(knob=knob, k_lo=self.k_lo, k_hi=acm.count)
            expected = {} if self.whole is None else self.whole.expected(knob)
            parts = self._measured(expected)
            knobs = quantiles(chain.from_iterable(part.turning for part in parts.values()))
            turning = ranks.averaged(knobs, self.device).numpy()
            share = self._share(parts, expected)
            self.probes[knob] = Probe(knob=knob, share=share, turning=turning, least=self.least)
            if len(self.probes) == _WHOLE:
                self.whole = Whole(parts, knob, self.least)
                self.count = sum(len(part.shares) for part in parts.values())
            _LOG.debug("knob %+.3f: budget %.3f, %d batches", knob, share, len(parts))
        return self.probes[knob].share

    def _measured(self, expected: Mapping[int, float]) -> dict[int, Part]:
        """Batches with the knob that is set: all, or as many as tell what all would spend."""
        if self.whole is None:
            return {number: self._run(number) for number in range(len(self.examples))}
        parts: dict[int, Part] = {}
        for number in self.whole.order:
            parts[number] = self._run(number)
            if self.whole.is_known_by(parts, expected):
                break
        return parts

    def _share(self, parts: Mapping[int, Part], expected: Mapping[int, float]) -> float:
        """The share of all batches: what is expected of them, and how those that were run differ from it."""
        beyond = [part.shares - expected.get(number, 0.0) for number, part in parts.items()]
        share = _mean_over_ranks(torch.cat(beyond), self.device)
        if self.whole is not None:
            share += _mean_over_ranks(self.whole.of_examples(expected), self.device)
        return round(share, _DIGITS)

    def _run(self, number: int) -> Part:
        """The shares of one batch's examples, and by site the knobs at which its tokens turn.

        What comes after the last call of an ACM is not run: once two forwards have made as many calls, the next end
        there. TrainingFailed for scores that are not finite: all are looked at with the first knob, as nan and infinity
        in data or weights show with every knob, and those of some examples afterwards.
        """
        inputs, mask = self.examples[number]
        model, calls, before = self.found.model, defaultdict[str, list[Tensor]](list), self.calls[number]
        every = max(1, self.tokens // _SCORED) if self.probes else 1
        last = before[0] if len(before) > 1 and len(set(before)) == 1 else 0

        def see(acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
            lowest = acm.within(self.k_lo, acm.count)[0] - acm.k_min
            x_BSD = tokens.to_batch(x.reshape(-1, x.shape[-1]), x.shape[:-1], acm.layout, site=acm.name)[::every]
            scores, costs = acm.gate(x_BSD.flatten(0, 1)), acm.choice_costs(x.device)
            knobs_Tn = turning_knobs(scores[:, lowest:], costs[lowest:], acm.gate.rule)
            calls[acm.name].append(knobs_Tn.unflatten(0, x_BSD.shape[:2]))
            if last and sum(map(len, calls.values())) == last:
                raise ForwardEnded

        watched = observed(self.found.owner, see)
        stopped = suppress(ForwardEnded)
        with batch_context(model, mask=mask), recorded(self.found) as usage, watched, stopped:
            call_model(model, inputs)
            before.append(sum(map(len, calls.values())))
        trim()
        turning = []
        for name, parts in calls.items():
            knobs_Rn = torch.cat(parts, dim=1)[usage.k[name][::every] != PADDING]
            refuse_broken(name, knobs_Rn, f"batch {number + 1} of {len(self.examples)} to measure budgets on")
            turning.append((knobs_Rn.flatten(), float(macs_per_learner(self.found.plan.site(name)))))
        if not self.probes:
            self.tokens += max(k_BS.numel() for k_BS in usage.k.values())
        real = max(int((k_BS != PADDING).sum()) for k_BS in usage.k.values())
        return Part(shares=usage.real_shares, tokens=real, turning=turning)

    def bisect(self, target: float, within: float) -> None:
        """Add probes until one lies `within` of `target` or the steps are used up.

        Between the knobs -1, of share .9, and 4, of share .3, a target of .5 is tried at 2.3, where a straight line
        crosses it, and next in the middle of the knobs around it.
        """
        for step in range(_STEPS):
            rows = self._rows()
            if min(abs(row.share - target) for row in rows) <= within:
                return
            right = bisect_left([-row.share for row in rows], -target)
            if right in (0, len(rows)):
                return
            low, high = rows[right - 1], rows[right]
            knobs, shares, _ = expected_between(low, high)
            guess = float(np.interp(-target, -shares, knobs))
            # where scores do not tell, each probe leaves more of the gap behind it
            margin = min(_MARGIN * 4**step, (high.knob - low.knob) / 2)
            self.probe(min(max(guess, low.knob + margin), high.knob - margin))
        self.missed.append(target)

    def _rows(self) -> list[Probe]:
        return [self.probes[knob] for knob in sorted(self.probes)]

    def fill(self) -> None:
        """Add rows until a straight line from row to row is near enough, but for gaps that no knob leads into.

        They are read from recorded scores where these tell enough, and probed where they do not.
        """
        for _ in range(_STEPS):
            unknown = [gap for low, high in pairwise(self._rows()) if (gap := self._fill(low, high)) is not None]
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
        if apart <= _APART and not self.missed:
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
            rows.append(BudgetPoint(share=shares[knob], knob=knob, k_lo=self.k_lo, measured=knob in self.probes))
        return tuple(rows)


@contextmanager
def undisturbed(found: Rewritten) -> Iterator[None]:
    """Eval mode without gradients; the mode, the choices, the budget and the cap set come back at the end."""
    owner, choices = found.owner, {acm: acm.run_time() for acm in found.acms.values()}
    budget, cap = owner.budget, owner.cap
    try:
        with torch.no_grad(), in_mode(found.model, training=False):
            yield
    finally:
        owner.budget, owner.cap = budget, cap
        for acm, values in choices.items():
            acm.set_run_time(values)


def _mean_over_ranks(shares: Tensor, device: torch.device) -> float:
    """The mean over all processes."""
    total = ranks.added(torch.stack([shares.sum(), shares.new_tensor(float(shares.numel()))]), device)
    if not total[1]:
        raise DataError("the examples to measure budgets on hold no real token", fix="give batches that are not empty")
    return float(total[0] / total[1])
