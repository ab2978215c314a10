"""Our own, trained: calibrated ACMs on the dense outputs, and the paper's three phases, whole or without a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn

from acm_compiler.baselines.acms import Converted, in_percent
from acm_compiler.baselines.method import BatchResult
from acm_compiler.baselines.trained.train import BATCH
from acm_compiler.data import Batch
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.passes.rewrite.rewrite import rewrite
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say
from acm_compiler.recipe.phases import DistillPhase, FinetunePhase, GatePhase, Phase
from acm_compiler.runtime.budgets import share_within
from acm_compiler.training.schedule import run_schedule

_TERMS = ("budget", "entropy", "diversity")
_WIDE = 0.1  # of the budgets drawn, where only one was asked for


class _Scheduled(Converted):
    """A model that phases of recipes train; an interrupted training goes on from its state."""

    name: ClassVar[str]
    trains = True

    def _carry_out(self, model: nn.Module, schedule: Sequence[Phase], budget: float | None = None) -> nn.Module:
        """Train the model, and return it; `budget`, a share of learner MACs: that of a training for it alone."""
        assert self.subject.job is not None
        job = self.subject.job(self.name)
        directory = job.directory if budget is None else job.directory / "state" / f"{budget:.6g}"
        decisions = {**job.decisions, "steps": self.subject.steps, "method": self.name}
        job = replace(job, directory=directory, budget=job.budget if budget is None else budget, decisions=decisions)
        conversion(model).default_budget = job.budget
        run_schedule(model, schedule, job, resume=True)
        return model.eval()


class Distilled(_Scheduled):
    """The recipe's ACMs, their learners then trained on the dense model's outputs at all budgets."""

    name, title = "acm_distilled", "ACM, then its learners distilled"

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Load what the recipe's run has saved, and train its learners at budgets drawn between the least and most."""
        super().convert(budgets, say)
        drawn = _range_of(budgets, self.subject.plan, low=conversion(self.model).table_min)
        if drawn is None:
            return
        phase = FinetunePhase(
            phase="finetune",
            objective="distillation",
            update="learners",
            steps=self.subject.steps,
            batch=BATCH,
            lr=5e-5,
            budget_range=drawn,
        )
        self.model = self._carry_out(self.model, [phase])


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The paper's phases as they are carried out here, or an ablation of them.

    without: a phase, whose steps the others get, or a loss term of finetune. learners: N of every site; None: the
    plan's. start: the plan's own, or at random as in the paper. budgets: drawn at every step, or the recipe's alone,
    or a training for each.
    """

    without: str | None = None
    learners: int | None = None
    start: Literal["plan", "random"] = "plan"
    budgets: Literal["drawn", "one", "each"] = "drawn"


class Paper(_Scheduled):
    """The plan's sites by the paper's phases, distill, gate and finetune, from the start that the plan has.

    Unlike the paper's, one training serves all budgets: each step of finetune draws one between the least and most.
    """

    name, title = "acm_paper", "ACM by the paper's three phases"
    variant: ClassVar[Variant] = Variant()

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Rewrite the dense model and train it: a sixth of the steps distill, a sixth gates, the rest all of it."""
        plan = self._plan()
        low = plan.cost.budget_min
        if self.variant.budgets == "each":
            shares = {budget: share_within(in_percent(budget), plan, low=low) for budget in budgets}
            reached = {budget: share for budget, share in shares.items() if share is not None}
            self.models = {
                budget: self._carry_out(rewrite(self.subject.dense, plan), self._schedule(None), share)
                for budget, share in reached.items()
            }
            return
        # without its phase, gates have no measured budgets to draw from
        drawn = self.variant.budgets == "drawn" and self.variant.without != "gate"
        schedule = self._schedule(_range_of(budgets, plan, low=low) if drawn else None)
        model = self._carry_out(rewrite(self.subject.dense, plan), schedule)
        self.models = dict.fromkeys(budgets, model)

    def reaches(self, budget: float) -> bool:
        """True within the table of budgets of the model that serves this one."""
        if budget not in self.models:
            return False
        self.model = self.models[budget]
        return super().reaches(budget)

    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward at the budget's setting of the gates."""
        self.model = self.models[budget]
        return super().run(batch, budget)

    def _plan(self) -> Plan:
        plan = self.subject.plan
        if self.variant.learners is not None:
            assert self.subject.replan is not None
            plan = self.subject.replan(self.variant.learners)
        return replace(plan, sites=tuple(map(self._site, plan.sites)))

    def _site(self, site: PlannedSite) -> PlannedSite:
        """A site that the dense model can teach, so no slices, which have bases of their own."""
        # projections have no learners but random ones before they distill
        at_random = self.variant.start == "random" or (self.variant.without == "distill" and site.kind == "linear")
        if at_random:
            site = replace(site, init="random", state="learners")
        return replace(site, form="auto", pair=None)

    def _schedule(self, drawn: tuple[float, float] | None) -> tuple[Phase, ...]:
        """The phases that are not left out, with all of the steps, the last with what rounding leaves."""
        finetune = FinetunePhase(
            phase="finetune",
            objective="distillation",
            steps=1,
            batch=BATCH,
            lr=5e-4,
            gate_lr=1e-2,
            entropy=0.2,
            budget_range=drawn,
        )
        if self.variant.without in _TERMS:
            finetune = finetune.model_copy(update={self.variant.without: 0.0})
        phases: tuple[tuple[Phase, int], ...] = (
            (DistillPhase(phase="distill", steps=1, batch=BATCH, lr=1e-3), 1),
            (GatePhase(phase="gate", steps=1, batch=BATCH, lr=1e-2), 1),
            (finetune, 4),
        )
        kept = [(phase, part) for phase, part in phases if phase.phase != self.variant.without]
        steps, whole = self.subject.steps, sum(part for _, part in kept)
        counts = [max(1, steps * part // whole) for _, part in kept[:-1]]
        counts.append(max(1, steps - sum(counts)))
        return tuple(phase.model_copy(update={"steps": count}) for (phase, _), count in zip(kept, counts, strict=True))


def _range_of(budgets: Sequence[float], plan: Plan, *, low: float) -> tuple[float, float] | None:
    """The shares of learner MACs between the least and the most of budgets, None where none is in reach."""
    asked = [share_within(in_percent(budget), plan, low=low) for budget in budgets]
    shares = [share for share in asked if share is not None]
    return (min(min(shares), max(shares) * (1 - _WIDE)), max(shares)) if shares else None


_VARIANTS = {
    "budget": ("no budget term", Variant(without="budget")),
    "entropy": ("no entropy term", Variant(without="entropy")),
    "diversity": ("no diversity term", Variant(without="diversity")),
    "distill": ("no distill phase", Variant(without="distill")),
    "gate": ("no gate phase", Variant(without="gate")),
    "finetune": ("no finetune phase", Variant(without="finetune")),
    "n2": ("2 learners", Variant(learners=2)),
    "n4": ("4 learners", Variant(learners=4)),
    "n8": ("8 learners", Variant(learners=8)),
    "n16": ("16 learners", Variant(learners=16)),
    "start": ("learners from a random start", Variant(start="random")),
    "drawn": ("trained at the recipe's budget alone", Variant(budgets="one")),
    "shared": ("a training for each budget", Variant(budgets="each")),
}


def _ablation(key: str) -> type[Paper]:
    """The method that differs from the paper's phases in one thing."""

    class Ablation(Paper):
        name = f"{Paper.name}-{key}"
        title = f"{Paper.title}: {_VARIANTS[key][0]}"
        variant = _VARIANTS[key][1]

    return Ablation


ABLATIONS = {key: _ablation(key) for key in _VARIANTS}
