"""The share of learner MACs that gates would spend at any knob, expected from their scores in one forward.

It is exact for the knob of that forward. With another one sites read what other numbers of learners made before them,
so what is expected only says where to measure next. And by how much it errs is nearly the same for all batches, which
spend very different shares: so a few that are measured tell what all would spend.
Shapes: T tokens, C choices of k from the lowest allowed one to N, E examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import GateRule, priced_errors
from acm_compiler.errors import TrainingFailed

STRONGEST_KNOB = 2.0**12
_LEVELS = 1025
# the batches that are measured first are every third one, and at least so many, with so many tokens
_STRIDE, _FEWEST, _TOKENS = 3, 4, 1365
# enough are measured once the standard error of the share of all is no larger
_SURE = 0.0015


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
    parts = [(knobs_R, torch.full((len(knobs_R),), weight, dtype=torch.float64)) for knobs_R, weight in knobs]
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
        return torch.tensor(each, dtype=torch.float64)

    def is_known_by(self, parts: Mapping[int, Part], expected: Mapping[int, float]) -> bool:
        """True if these batches, by how they differ from what is expected of them, tell the share of all."""
        seen = [number for number in parts if number in expected]
        if len(seen) < _FEWEST or sum(part.tokens for part in parts.values()) < _TOKENS:
            return False
        weights = [self._examples[number] for number in seen]
        errors = np.array([float(parts[number].shares.mean()) - expected[number] for number in seen])
        spread = np.average((errors - np.average(errors, weights=weights)) ** 2, weights=weights)
        unseen = 1 - len(seen) / len(expected)
        return math.sqrt(spread / (len(seen) - 1) * unseen) <= _SURE
