"""Phase II: the gates learn, from the learners' errors, how many learners each token needs (docs/semantics.md).

Shapes: T tokens, D in, O out, C = N - k_min + 1 values of k.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.planning.plan import Plan
from acm_compiler.recipe.phases import LabelRule
from acm_compiler.training.labels import label_columns
from acm_compiler.training.modes import free_gate
from acm_compiler.training.phase import Figures
from acm_compiler.training.prefixes import prefix_errors
from acm_compiler.training.tapped import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLabels:
    """A `SiteObjective`: cross entropy of nu = softmax((u + gumbel) / temperature) with the tokens' labels.

    Labels follow from d(k) = ||y_k(z) - o||_2 by `labels`. `rank` and `world` give each process its part of the
    noise that one process would draw for all their tokens.
    """

    name: ClassVar[str] = "gate"
    labels: LabelRule
    temperature: float
    plan: Plan
    rank: int = 0
    world: int = 1

    def prepare(self, acm: ACM) -> None:
        """What the gate learns here are logits, whatever its scores meant before."""
        acm.gate.rule = "logits"

    def parameters(self, acm: ACM) -> Iterable[nn.Parameter]:
        """The gate; the learners stay as they are."""
        return acm.gate.parameters()

    def width(self, acm: ACM) -> int:
        """Tokens at their label, and one count per choice."""
        return 1 + acm.count - acm.k_min + 1

    def loss(self, acm: ACM, x_TD: Tensor, o_TO: Tensor, *, real_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """The cross entropy summed over tokens; figures: tokens at their label without noise, and choices [C]."""
        u_TC = acm.utilities(x_TD, torch.zeros((), device=x_TD.device))
        noise_TC = self._noise(u_TC)
        label_T = label_columns(self._errors(acm, x_TD, o_TO), self.labels)
        if real_T is not None:
            u_TC, noise_TC, label_T = u_TC[real_T], noise_TC[real_T], label_T[real_T]
        total = F.cross_entropy((u_TC + noise_TC) / self.temperature, label_T, reduction="sum")
        chosen_T = u_TC.detach().argmax(1)
        right = (chosen_T == label_T).sum()[None]
        return total, torch.cat([right, torch.bincount(chosen_T, minlength=u_TC.shape[1])])

    @torch.no_grad()
    def _errors(self, acm: ACM, x_TD: Tensor, o_TO: Tensor) -> Tensor:
        """d(k) [C, T]."""
        errors = prefix_errors(x_TD, o_TO, acm.learners.weights(), acm.k_min)
        return torch.stack([torch.linalg.vector_norm(error_TO, dim=-1) for error_TO in errors])

    def _noise(self, u_TC: Tensor) -> Tensor:
        """Gumbel noise like `u_TC`, from the global generator: this process's rows of everyone's."""
        tokens = u_TC.shape[0]
        drawn = u_TC.new_empty(self.world * tokens, u_TC.shape[1]).exponential_()
        return -drawn[self.rank * tokens : (self.rank + 1) * tokens].log()

    def figures(self, sums: Sums, losses: dict[str, float]) -> Figures:
        """`loss` is the mean of the sites' losses, `agreement` the share of tokens that choose their label."""
        tokens = sum(values[0] for values in sums.values())
        right = sum(values[1] for values in sums.values())
        choices = {name: values[2:] for name, values in sums.items()}
        terms = {"loss": sum(losses.values()) / len(losses), "agreement": right / max(tokens, 1.0)}
        return Figures(terms=terms, reached=self._share(choices), choices=choices)

    def _share(self, choices: dict[str, list[float]]) -> float:
        """The share of learner MACs that these choices run, over all tokens together."""
        run = full = 0.0
        for name, counts in choices.items():
            site = self.plan.site(name)
            run += macs_per_learner(site) * sum((site.k_min + c) * count for c, count in enumerate(counts))
            full += macs_per_learner(site) * site.learners * sum(counts)
        return run / max(full, 1.0)

    def complete(self, acm: ACM) -> None:
        """From now on the gates decide, as trained."""
        free_gate(acm)
