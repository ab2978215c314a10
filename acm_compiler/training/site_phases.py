"""Phase I: every ACM imitates the part of the network that it replaces, at every k (docs/semantics.md).

Shapes: T tokens, D in, O out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.training.phase import Figures
from acm_compiler.training.prefixes import prefix_errors
from acm_compiler.training.tapped import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill:
    """A `SiteObjective`: L = mean over tokens and over k of ||y_k(z) - o||^2.

    `detach`: each prefix's error trains only its last learner, as in the paper's released code.
    """

    name: ClassVar[str] = "distill"
    detach: bool = False

    def prepare(self, acm: ACM) -> None:
        """Nothing to change: the dense region answers while its learners learn."""

    def parameters(self, acm: ACM) -> Iterable[nn.Parameter]:
        """The learners; gates have no part in this phase."""
        return acm.learners.parameters()

    def width(self, acm: ACM) -> int:
        """One figure: the size of the output."""
        return 1

    def loss(self, acm: ACM, x_TD: Tensor, o_TO: Tensor, *, real_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """The squared error summed over tokens; the figure is ||o||^2, summed too."""
        if real_T is not None:
            x_TD, o_TO = x_TD[real_T], o_TO[real_T]
        errors = prefix_errors(x_TD, o_TO, acm.learners.weights(), acm.k_min, last_only=self.detach)
        squares = [error_TO.square().sum() for error_TO in errors]
        size = o_TO.to(squares[0].dtype).square().sum()
        return torch.stack(squares).mean(), size[None]

    def figures(self, sums: Sums, losses: dict[str, float]) -> Figures:
        """`loss` is the mean of the sites' losses, `relative_error` that of error over the size of the output."""
        relative = [losses[name] * tokens / max(size, 1e-30) for name, (tokens, size) in sums.items()]
        terms = {"loss": sum(losses.values()) / len(losses), "relative_error": sum(relative) / len(relative)}
        return Figures(terms=terms)

    def complete(self, acm: ACM) -> None:
        """From now on the learners answer."""
        acm.state = "learners"
