"""Phases distill and gate (docs/semantics.md).

distill: every ACM imitates the part of the network that it replaces, at every k.
gate: gates learn, from the learners' errors, how many learners each token needs, by a rule that a recipe names.
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
from acm_compiler.acm.learners import gumbel_noise
from acm_compiler.passes.rewrite.conversion import rewritten
from acm_compiler.passes.rewrite.dense_region import read_dense
from acm_compiler.planning.cost import learner_macs
from acm_compiler.planning.plan import Plan
from acm_compiler.recipe.phases import DistillPhase, GatePhase, LabelRule, TrainedPhase
from acm_compiler.runtime.control import refuse_unfitted
from acm_compiler.runtime.ranks import from_first
from acm_compiler.training.live_state import SharedNoise
from acm_compiler.training.machine import Machine
from acm_compiler.training.phase import Figures, Job, free_gate
from acm_compiler.training.tapped import Sums, TappedPhase, prefix_errors


def distill_phase(model: nn.Module, config: DistillPhase, job: Job, machine: Machine) -> TappedPhase:
    """The distill phase of one model."""
    return TappedPhase(model, Distill(detach=config.detach), job.task, machine, batch=config.batch)


def start_projections(model: nn.Module) -> None:
    """Let learners of projections that no phase has fitted begin at the dense weight's singular directions.

    Those that the plan starts at random, as the paper does, stay as they are, and slices.
    """
    found = rewritten(model)
    for site in found.plan.sites:
        acm = found.acms[site.name]
        unfitted = site.kind == "linear" and site.init == "auto" and acm.state == "dense"
        if unfitted and acm.learners.act == "identity" and acm.learners.w_out is not None:
            acm.learners.start_factors(*read_dense(found, [site.name])[site.name].first[0])
            from_first([acm.learners])


def gate_phase(model: nn.Module, config: GatePhase, job: Job, machine: Machine) -> TappedPhase:
    """The gate phase of one model. SitesNotFitted."""
    found = rewritten(model)
    refuse_unfitted(found, "a gate phase")
    objective = GateLabels(
        labels=config.labels,
        temperature=config.temperature,
        plan=found.plan,
        noise=None if machine.world == 1 else SharedNoise(machine),
    )
    return TappedPhase(model, objective, job.task, machine, batch=config.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill:
    """A `SiteObjective`: L = mean over tokens and over k of ||y_k(z) - o||^2.

    `detach`: each prefix's error trains only its last learner, as in the paper's released code.
    """

    name: ClassVar[str] = "distill"
    section: ClassVar[type[TrainedPhase]] = DistillPhase
    detach: bool = False

    def prepare(self, acm: ACM) -> None:
        """Nothing to change: the dense region runs while its learners learn."""

    def parameters(self, acm: ACM) -> Iterable[nn.Parameter]:
        """The learners; gates have no part in this phase."""
        return acm.learners.parameters()

    def width(self, acm: ACM) -> int:
        """One figure: the size of the output."""
        return 1

    def loss(self, acm: ACM, x: Tensor, o: Tensor, *, real_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """The squared error summed over tokens; the figure is ||o||^2, summed too."""
        x_TD, o_TO = x.flatten(0, -2), o.flatten(0, -2)
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
        """Run the learners from now on."""
        acm.state = "learners"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLabels:
    """A `SiteObjective`: cross entropy of nu = softmax((u + gumbel) / temperature) with the tokens' labels.

    Labels follow from d(k) = ||y_k(z) - o||_2 by `labels`. `noise` gives each of several processes its part of what one
    would draw for all their tokens.
    """

    name: ClassVar[str] = "gate"
    section: ClassVar[type[TrainedPhase]] = GatePhase
    labels: LabelRule
    temperature: float
    plan: Plan
    noise: SharedNoise | None = None

    def prepare(self, acm: ACM) -> None:
        """Give the gate the rule of logits, which it learns here, whatever its scores meant before."""
        acm.gate.rule = "logits"

    def parameters(self, acm: ACM) -> Iterable[nn.Parameter]:
        """The gate; the learners stay as they are."""
        return acm.gate.parameters()

    def width(self, acm: ACM) -> int:
        """Tokens at their label, and one count per choice."""
        return 1 + acm.count - acm.k_min + 1

    def loss(self, acm: ACM, x: Tensor, o: Tensor, *, real_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """The cross entropy summed over tokens; figures: tokens at their label without noise, and choices [C]."""
        x_TD, o_TO = x.flatten(0, -2), o.flatten(0, -2)
        u_TC = acm.utilities(x_TD, torch.zeros((), device=x_TD.device))
        noise_TC = gumbel_noise(u_TC) if self.noise is None else self.noise(acm, u_TC, x.shape[:-1])
        label_T = relative_improvement(self._errors(acm, x_TD, o_TO), self.labels.tau)
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

    def figures(self, sums: Sums, losses: dict[str, float]) -> Figures:
        """`loss` is the mean of the sites' losses, `agreement` the share of tokens that choose their label."""
        tokens = sum(values[0] for values in sums.values())
        right = sum(values[1] for values in sums.values())
        choices = {name: values[2:] for name, values in sums.items()}
        terms = {"loss": sum(losses.values()) / len(losses), "agreement": right / max(tokens, 1.0)}
        return Figures(terms=terms, reached=self._share(choices), choices=choices)

    def _share(self, choices: dict[str, list[float]]) -> float:
        """The share of learner MACs that these choices run, over all tokens together."""
        runs = []
        for name, counts in choices.items():
            site = self.plan.site(name)
            runs.append((site, sum((site.k_min + c) * count for c, count in enumerate(counts)), sum(counts)))
        run, full = learner_macs(runs)
        return run / max(full, 1.0)

    def complete(self, acm: ACM) -> None:
        """From now on the gates decide, as trained."""
        free_gate(acm)


def relative_improvement(error_CT: Tensor, tau: float) -> Tensor:
    """The column [T] of the smallest k for which one more learner improves the error by less than the factor tau.

    error_CT holds d(k) = ||y_k - o||_2 for k from k_min to N. That is d(k) / d(k + 1) < tau; where there is no such k
    the label is N, the last column. An error of zero cannot be improved: the token stops there.
    """
    now, next_ = error_CT[:-1], error_CT[1:]
    stops = (now < tau * next_) | (now == 0)
    # argmax finds the first True; without any, the count of columns passed is all of them
    passed = (~stops).cumprod(0)
    return passed.sum(0)
