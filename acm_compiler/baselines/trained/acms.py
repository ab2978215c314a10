"""Our own, trained: ACMs that were calibrated and then learn the dense outputs, and the paper's three phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from acm_compiler.baselines.learners import Converted, in_percent
from acm_compiler.baselines.trained.train import BATCH
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.passes.rewrite.rewrite import rewrite
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say
from acm_compiler.recipe.phases import DistillPhase, FinetunePhase, GatePhase, Phase
from acm_compiler.runtime.budgets import share_within
from acm_compiler.training.schedule import run_schedule

_WIDE = 0.1  # of the budgets drawn, where only one was asked for


class _Scheduled(Converted):
    """A model that phases of recipes train; an interrupted training goes on from its state."""

    trains = True

    def _carry_out(self, name: str, model: nn.Module, schedule: Sequence[Phase]) -> None:
        assert self.subject.job is not None
        job = self.subject.job(name)
        conversion(model).default_budget = job.budget
        job = replace(job, decisions={**job.decisions, "steps": self.subject.steps, "method": name})
        run_schedule(model, schedule, job, resume=True)
        self.model = model.eval()


class Distilled(_Scheduled):
    """The recipe's ACMs, their learners then trained on the dense model's outputs at all budgets."""

    title = "ACM, then its learners distilled"

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Load what the recipe's run has saved, and train its learners at budgets drawn between the least and most."""
        super().convert(budgets, say)
        owner = conversion(self.model)
        drawn = _range_of(budgets, owner.plan, low=owner.table_min)
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
        self._carry_out("acm_distilled", self.model, [phase])


class Paper(_Scheduled):
    """The plan's sites by the paper's phases, distill, gate and finetune, from the start that the plan has.

    Unlike the paper's, one training serves all budgets: each step of finetune draws one between the least and most.
    """

    title = "ACM by the paper's three phases"

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Rewrite the dense model and train it: a third of the steps distill, a sixth gates, the rest all of it."""
        plan, steps = self.subject.plan, self.subject.steps
        # slices have bases of their own, which the dense model cannot teach
        sites = tuple(replace(site, form="auto", pair=None) for site in plan.sites)
        model = rewrite(self.subject.dense, replace(plan, sites=sites))
        distill, gate = max(1, steps // 3), max(1, steps // 6)
        schedule = (
            DistillPhase(phase="distill", steps=distill, batch=BATCH, lr=3e-3),
            GatePhase(phase="gate", steps=gate, batch=BATCH, lr=1e-2),
            FinetunePhase(
                phase="finetune",
                objective="distillation",
                steps=max(1, steps - distill - gate),
                batch=BATCH,
                lr=5e-4,
                gate_lr=1e-2,
                entropy=0.2,
                budget_range=_range_of(budgets, plan, low=plan.cost.budget_min),
            ),
        )
        self._carry_out("acm_paper", model, schedule)


def _range_of(budgets: Sequence[float], plan: Plan, *, low: float) -> tuple[float, float] | None:
    """The shares of learner MACs between the least and the most of budgets, None where none is in reach."""
    asked = [share_within(in_percent(budget), plan, low=low) for budget in budgets]
    shares = [share for share in asked if share is not None]
    return (min(min(shares), max(shares) * (1 - _WIDE)), max(shares)) if shares else None
