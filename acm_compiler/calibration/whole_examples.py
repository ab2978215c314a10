"""A few examples kept whole at a site: inputs and gradients of all their tokens.

Sums over single tokens do not show what errors of many tokens do together, where all of an example's tokens are wrong
alike: with these examples it is seen. Shapes: T tokens, D in, O out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """x_TD: inputs of the tokens, g_TO: gradients at their outputs, example_T: to which example each belongs."""

    x_TD: Tensor
    g_TO: Tensor
    example_T: Tensor


class WholeExamples:
    """The first examples of a stream, at least one, up to `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self._until = self._next = 0
        self._kept: list[list[Tensor]] = []

    def offer(self, x_TD: Tensor, example_T: Tensor, d_out: int) -> Callable[[Tensor], None]:
        """Keep what belongs to kept examples; the gradients [T, d_out] of all of `x_TD` go to what comes back.

        Examples are numbered from 0 in the order of the data; a site may be called several times for the same ones.
        """
        if len(example_T) and int(example_T.max()) >= self._next:
            self._decide(example_T)
        kept_T = example_T < self._until
        if not kept_T.any():
            return _nothing
        entry = [x_TD[kept_T], x_TD.new_zeros(int(kept_T.sum()), d_out), example_T[kept_T]]
        self._kept.append(entry)

        def take(g_TO: Tensor) -> None:
            entry[1] = g_TO[kept_T].to(entry[0])

        return take

    def _decide(self, example_T: Tensor) -> None:
        """How many of the examples of a new batch are kept: none after one that was not."""
        counts = torch.bincount(example_T - self._next)
        fitting = int((counts.cumsum(0) <= self._left).sum())
        if self._until == self._next:
            self._until += fitting if self._until else max(1, fitting)
        self._left -= int(counts[:fitting].sum())
        self._next += len(counts)

    def value(self) -> Whole | None:
        """All that was kept; None where nothing was."""
        if not self._kept:
            return None
        x_TD, g_TO, example_T = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        return Whole(x_TD=x_TD, g_TO=g_TO, example_T=example_T.unique(return_inverse=True)[1])


def _nothing(g_TO: Tensor) -> None:
    """Gradients of examples that are not kept."""
