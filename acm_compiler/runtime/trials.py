"""Trial forwards of a converted model: the share of learner MACs that its data spend at one knob.

The strongest and the weakest knob run all batches. Their scores tell what every batch would spend at any other knob:
exactly for the knob of a forward; with another one sites read what other numbers of learners made before them. By how
much it errs is nearly the same for all batches, so a few that are run tell what all would spend.

Shapes: T tokens, C choices of k from the lowest allowed one to N, E examples.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from acm_compiler.acm import ACM
from acm_compiler.acm.context import observed
from acm_compiler.acm.intact import in_parts
from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import GateRule, priced_errors
from acm_compiler.errors import DataError, TrainingFailed
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.offload import trim
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.runtime import ranks
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.usage import PADDING, Usage, recorded
from acm_compiler.sources.inputs import Example, ForwardEnded, call_model

_LOG = logging.getLogger(__name__)
STRONGEST_KNOB = 2.0**12
_LEVELS = 1025
# the batches that are measured first are every third one, and at least so many, with so many tokens
_STRIDE, _FEWEST, _TOKENS = 3, 4, 1365
# enough are measured once the standard error of the share of all is no larger, or half of that of other data
_SURE = 0.0015
# digits of a share that are no rounding; tokens of each site, in whole examples, whose scores say where to look next
_DIGITS, _SCORED = 12, 4096


@torch.no_grad()
def turning_knobs(score_TC: Tensor, cost_C: Tensor, rule: GateRule) -> Tensor:
    """The knobs [T, C - 1] from which on a token runs at most the first, the second, ... choice but the last.

    Gates choose argmin_k e_k + lambda c_k with e the `priced_errors`. One of the choices j <= n is as good as all
    i > n from lambda = min_j max_i (e_j - e_i) / (c_i - c_j) on. Rows of scores that are not finite are nan; a knob
    that would have to be below the strongest one is that one.
    """
    score_TC, cost_C = to_float64(score_TC), to_float64(cost_C)
    error_TC, knob_of = priced_errors(score_TC, rule)
    price_Tji = (error_TC[:, :, None] - error_TC[:, None, :]) / (cost_C - cost_C[:, None])
    least = [price_Tji[:, :n, n:].amax(2).amin(1) for n in range(1, len(cost_C))]
    price_Tn = torch.stack(least, 1) if least else score_TC[:, :0]
    knob_Tn = torch.where(score_TC.isfinite().all(1, keepdim=True), knob_of(price_Tn), torch.nan)
    return knob_Tn.clamp(-STRONGEST_KNOB, STRONGEST_KNOB)


def refuse_broken(name: str, knobs_Rn: Tensor, which: str) -> None:
    """TrainingFailed where the score of a real token is not finite; `which` batch it was."""
    count = int(knobs_Rn.isnan().any(1).sum())
    if count:
        raise TrainingFailed(
            "the gate's scores are not finite, so what it chooses is chance",
            where=name,
            found=f"nan or infinity at {count:,} of {len(knobs_Rn):,} tokens of {which}",
            fix="look for such values in the data and in the model's weights, or run it in a wider floating type",
        )


def quantiles(knobs: Iterable[tuple[Tensor, float]]) -> Tensor:
    """The knobs, from low to high, above which 1, ..., 0 of all weight lies; each tensor with the weight of one knob.

    float64 [levels].
    """
    parts = [(knobs_R, torch.full_like(knobs_R, weight, dtype=torch.float64)) for knobs_R, weight in knobs]
    values, order = torch.cat([values for values, _ in parts]).sort()
    weights = torch.cat([weights for _, weights in parts])[order]
    if not len(values):
        return torch.zeros(_LEVELS, dtype=torch.float64)
    below = (weights.cumsum(0) - weights / 2) / weights.sum()
    return torch.from_numpy(np.interp(np.linspace(0, 1, _LEVELS), below.numpy(), values.numpy()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A forward's knob, the share measured, and the knobs [levels] by which tokens would run fewer learners.

    least: the share of all tokens at their lowest k.
    """

    knob: float
    share: float
    turning: np.ndarray
    least: float

    def expected(self, knobs: np.ndarray) -> np.ndarray:
        """The shares at other knobs if every site read what it read here; at the probe's own, what was measured."""
        below = np.interp([self.knob, *knobs], self.turning, np.linspace(0, 1, len(self.turning)))
        return self.share - (1 - self.least) * (below[1:] - below[0])


def expected_between(low: Probe, high: Probe) -> tuple[np.ndarray, np.ndarray, float]:
    """Knobs from that of `low` to that of `high`, the shares expected of them, and by how much both ends disagree.

    Shares fall and are as measured at both ends. What sites read changes from the one forward to the other, by as much
    as the share has moved.
    """
    knobs = np.union1d(low.turning, high.turning)
    knobs = np.array([low.knob, *knobs[(knobs > low.knob) & (knobs < high.knob)], high.knob])
    from_low, from_high = low.expected(knobs), high.expected(knobs)
    behind, ahead = low.share - from_low, from_high - high.share
    moved = behind / np.maximum(behind + ahead, 1e-12)
    shares = from_low + moved * (from_high - from_low)
    shares = np.minimum.accumulate(shares).clip(high.share, low.share)
    return knobs, shares, float(abs(from_high - from_low).max())


def corners(knobs: np.ndarray, shares: np.ndarray, within: float, first: int = 0) -> list[int]:
    """The places of a curve through which a line of straight pieces, from its one end to the other, needs to lead.

    Nowhere does that line miss a share by more than `within`. The place where one straight piece misses most comes
    first. `first` is the number of the first place.
    """
    line = np.interp(knobs, knobs[[0, -1]], shares[[0, -1]])
    most = int(abs(shares - line).argmax())
    if abs(shares - line)[most] <= within:
        return []
    left = corners(knobs[: most + 1], shares[: most + 1], within, first)
    return [first + most, *left, *corners(knobs[most:], shares[most:], within, first + most)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One batch at one knob: the shares of its examples [E], real tokens, tokens that ran, padding too, and its tokens'
    knobs as `quantiles` takes them.
    """

    shares: Tensor
    tokens: int
    run: int
    turning: list[tuple[Tensor, float]]


class Whole:
    """All batches, by number, at one knob, and what that lets expect of each at any other."""

    def __init__(self, parts: Mapping[int, Part], knob: float, least: float) -> None:
        self._examples = {number: len(part.shares) for number, part in parts.items() if len(part.shares)}
        self._probes = {
            number: Probe(
                knob=knob,
                share=float(parts[number].shares.mean()),
                turning=quantiles(parts[number].turning).numpy(),
                least=least,
            )
            for number in self._examples
        }
        self.order = sorted(parts, key=lambda number: number % _STRIDE)

    def expected(self, knob: float) -> dict[int, float]:
        """The share of each batch that holds a real token."""
        return {number: float(probe.expected(np.array([knob]))[0]) for number, probe in self._probes.items()}

    def of_examples(self, expected: Mapping[int, float]) -> Tensor:
        """The share expected of every example, which is that of its batch, float64 [E]."""
        each = [share for number, share in expected.items() for _ in range(self._examples[number])]
        return torch.tensor(each, dtype=torch.float64, device="cpu")

    def is_known_by(self, parts: Mapping[int, Part], expected: Mapping[int, float], error: float = 0.0) -> bool:
        """True if these batches, by how they differ from what is expected, tell the share of all, which errs so far."""
        seen = [number for number in parts if number in expected]
        if len(seen) < _FEWEST or sum(part.tokens for part in parts.values()) < _TOKENS:
            return False
        weights = [self._examples[number] for number in seen]
        errors = np.array([float(parts[number].shares.mean()) - expected[number] for number in seen])
        spread = np.average((errors - np.average(errors, weights=weights)) ** 2, weights=weights)
        unseen = 1 - len(seen) / len(expected)
        return math.sqrt(spread / (len(seen) - 1) * unseen) <= max(_SURE, error / 2)


class Trials:
    """Forwards of one model over the same batches, knob by knob: `extremes` first, then any other by `at`."""

    count: int  # examples that hold a real token
    error: float = 0.0  # standard error, over examples, with which shares measured here are those of other data
    _whole: Whole

    def __init__(self, found: Rewritten, examples: Sequence[Example], k_lo: int) -> None:
        self._found, self._examples, self.k_lo = found, examples, k_lo
        self._least = found.plan.cost.least_share(k_lo)
        self._calls: dict[int, int] = {}  # of ACMs, in a whole forward of a batch
        self._run_all = partial(ranks.shared, self._run, apart=not in_parts(found.model))
        self._every = 1  # one of so many examples has its scores looked at

    def extremes(self, done: Callable[[], object]) -> tuple[Probe, Probe]:
        """The probes of the strongest and the weakest knob, of all batches; `done` is called after each.

        Nan and infinity in data or weights show with every knob: the first one looks at the scores of all examples.
        """
        strongest, parts = self._of_all(STRONGEST_KNOB, done)
        self._every = max(1, sum(part.run for part in parts.values()) // _SCORED)
        weakest, parts = self._of_all(-STRONGEST_KNOB, done)
        self._whole = Whole(parts, weakest.knob, self._least)
        self.count = sum(len(part.shares) for part in parts.values())
        return strongest, weakest

    def at(self, knob: float) -> Probe:
        """The probe of any other knob, of as many batches as tell what all would spend.

        Its share is what is expected of all batches, and by how much those that were run differ from it.
        """
        self._set(knob)
        expected = self._whole.expected(knob)
        parts: dict[int, Part] = {}
        for number, part in zip(self._whole.order, self._run_all(self._whole.order), strict=False):
            parts[number] = part
            if self._whole.is_known_by(parts, expected, self.error):
                break
        shares = torch.cat([part.shares for part in parts.values()])
        self.error = max(self.error, float(shares.std(correction=0)) / math.sqrt(self.count))
        beyond = torch.cat([part.shares - expected.get(number, 0.0) for number, part in parts.items()])
        share = self._mean(beyond) + self._mean(self._whole.of_examples(expected))
        return self._probe(knob, share, parts)

    def _of_all(self, knob: float, done: Callable[[], object]) -> tuple[Probe, dict[int, Part]]:
        self._set(knob)
        parts: dict[int, Part] = {}
        for part in self._run_all(range(len(self._examples))):
            parts[len(parts)] = part
            done()
        share = self._mean(torch.cat([part.shares for part in parts.values()]))
        return self._probe(knob, share, parts), parts

    def _set(self, knob: float) -> None:
        for acm in self._found.acms.values():
            acm.set_choices(knob=knob, k_lo=self.k_lo, k_hi=acm.count)

    def _mean(self, shares: Tensor) -> float:
        if not len(shares):
            raise DataError(
                "the examples to measure budgets on hold no real token", fix="give batches that are not empty"
            )
        return float(shares.mean())

    def _probe(self, knob: float, share: float, parts: Mapping[int, Part]) -> Probe:
        turning = quantiles(chain.from_iterable(part.turning for part in parts.values())).numpy()
        probe = Probe(knob=knob, share=round(share, _DIGITS), turning=turning, least=self._least)
        _LOG.debug("knob %+.3f: budget %.3f, %d batches", knob, probe.share, len(parts))
        return probe

    def _run(self, number: int) -> Part:
        """Run one batch with the knob that is set; TrainingFailed where a score of a real token is not finite."""
        usage, knobs = self._forward(number)
        real = {name: k_BS != PADDING for name, k_BS in usage.k.items()}
        turning = []
        for name, knobs_BSn in knobs.items():
            knobs_Rn = knobs_BSn[real[name][:: self._every]]
            refuse_broken(name, knobs_Rn, f"batch {number + 1} of {len(self._examples)} to measure budgets on")
            turning.append((knobs_Rn.flatten().cpu(), float(macs_per_learner(self._found.plan.site(name)))))
        return Part(
            shares=usage.real_shares.cpu(),
            tokens=max(int(real_BS.sum()) for real_BS in real.values()),
            run=max(real_BS.numel() for real_BS in real.values()),
            turning=turning,
        )

    def _forward(self, number: int) -> tuple[Usage, dict[str, Tensor]]:
        """The usage of a batch, and by site the knobs [B, S, C - 1] at which every so many-th example's tokens turn.

        A batch is run whole once; from then on what comes after its last call of an ACM is not run.
        """
        inputs, mask = self._examples[number]
        model, calls, last = self._found.model, defaultdict[str, list[Tensor]](list), self._calls.get(number)

        def see(acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
            lowest = acm.within(self.k_lo, acm.count)[0] - acm.k_min
            x_BSD = acm.by_example(x.reshape(-1, x.shape[-1]), x.shape[:-1])[:: self._every]
            scores, costs = acm.gate(x_BSD.flatten(0, 1)), acm.choice_costs(x.device)
            knobs_Tn = turning_knobs(scores[:, lowest:], costs[lowest:], acm.gate.rule)
            calls[acm.name].append(knobs_Tn.unflatten(0, x_BSD.shape[:2]))
            if sum(map(len, calls.values())) == last:
                raise ForwardEnded

        stopped = suppress(ForwardEnded)
        with batch_context(model, mask=mask), recorded(self._found) as usage, observed(self._found.owner, see), stopped:
            call_model(model, inputs)
            self._calls[number] = sum(map(len, calls.values()))
        trim(hold=True)
        return usage, {name: torch.cat(parts, dim=1) for name, parts in calls.items()}
