"""A few examples kept whole at a site: inputs and gradients of all their tokens.

Sums over single tokens do not show what errors of many tokens do together, where all of an example's tokens are wrong
alike: with these examples it is seen. Shapes: T tokens, P projections of the model's answer, D in, O out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """x_TD: inputs of the tokens, g_TPO: gradients at their outputs, example_T: to which example each belongs.

    listens_T: |g|^2 of each token, summed over P, in the model's own basis, whatever basis `g_TPO` is in.
    """

    x_TD: Tensor
    g_TPO: Tensor
    listens_T: Tensor
    example_T: Tensor


class WholeExamples:
    """The first examples of a stream, at least one, up to `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self._until = self._next = 0
        self._kept: list[tuple[Tensor, Tensor, list[Tensor]]] = []

    def offer(self, x_TD: Tensor, example_T: Tensor) -> Callable[[Tensor], None]:
        """Keep what belongs to kept examples; gradients [T, O] of all of `x_TD` go to what comes back, each in a call.

        Examples are numbered from 0 in the order of the data; a site may be called several times for the same ones.
        """
        if len(example_T) and int(example_T.max()) >= self._next:
            self._decide(example_T)
        kept_T = example_T < self._until
        if not kept_T.any():
            return _nothing
        x_TD = x_TD[kept_T]
        gradients: list[Tensor] = []
        self._kept.append((x_TD, example_T[kept_T], gradients))

        def take(g_TO: Tensor) -> None:
            gradients.append(g_TO[kept_T].to(x_TD))

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
        heard = [(x_TD, example_T, torch.stack(g, 1)) for x_TD, example_T, g in self._kept if g]
        if not heard:
            return None
        x_TD, example_T, g_TPO = (torch.cat(parts) for parts in zip(*heard, strict=True))
        return Whole(
            x_TD=x_TD,
            g_TPO=g_TPO,
            listens_T=g_TPO.square().sum((1, 2)),
            example_T=example_T.unique(return_inverse=True)[1],
        )


def _nothing(g_TO: Tensor) -> None:
    """Gradients of examples that are not kept."""
