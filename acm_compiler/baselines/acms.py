"""Our own: the model converted by its recipe, and two controls made of the same learners."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.context import Said
from acm_compiler.baselines.method import BatchResult, Method
from acm_compiler.checkpoint import load
from acm_compiler.data import Batch
from acm_compiler.passes.rewrite.conversion import conversion, rewritten
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.budgets import share_within
from acm_compiler.runtime.control import set_budget, set_k
from acm_compiler.runtime.usage import Usage, record
from acm_compiler.sources.inputs import call_model


class Converted(Method):
    """The recipe's ACMs, whose gates are set to a share of the dense model's MACs on the subject's example."""

    title = "ACM"

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """Every token at the lowest k of the plan; calibration may raise it."""
        return plan.cost.model_share(plan.cost.budget_min)

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Load what the recipe's run has saved."""
        assert self.subject.folder is not None
        loaded = load(self.subject.folder, base_model=self.subject.dense)
        device = next(self.subject.dense.parameters()).device
        self.model = loaded.to(device).eval()

    def reaches(self, budget: float) -> bool:
        """True within the table of budgets that was measured."""
        return self._share(budget) is not None

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward at the budget's setting of the gates."""
        self._set(budget)
        score_B, usage = self._forward(batch)
        return BatchResult(score_B, usage.macs)

    def _share(self, budget: float) -> float | None:
        """The share of the learners' MACs at which the subject's example costs the budget; None out of reach."""
        return share_within(in_percent(budget), self.subject.plan, low=conversion(self.model).table_min)

    def _set(self, budget: float) -> None:
        share = self._share(budget)
        assert share is not None
        set_budget(self.model, share)

    def _forward(self, batch: Batch) -> tuple[Tensor, Usage]:
        inputs, mask_BS = self.subject.task.call_arguments(batch)
        with batch_context(self.model, mask=mask_BS), record(self.model) as usage:
            output = call_model(self.model, inputs)
        return self.score(output, batch), usage


class Shuffled(Converted):
    """The control of *where* learners run: the gates' own choices, dealt out to the tokens of the batch at random.

    The choices are those of a forward before, so that as many learners run at every site.
    """

    title = "random: as many learners, at random tokens"

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Load the same model, and keep or deal what its gates choose."""
        super().convert(budgets, say)
        self.drawn = torch.Generator().manual_seed(self.subject.seed)
        self._dealing, self._kept = False, dict[str, list[Tensor]]()
        for acm in rewritten(self.model).acms.values():
            acm.choose = self._instead(acm)  # type: ignore[method-assign]

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward to see the choices, and one that deals them out."""
        self._set(budget)
        self._dealing, self._kept = False, {}
        self._forward(batch)
        self._dealing = True
        score_B, usage = self._forward(batch)
        return BatchResult(score_B, usage.macs)

    def _instead(self, acm: ACM) -> Any:
        choose = acm.choose

        def kept_or_dealt(x_TD: Tensor, shape: torch.Size, said: Said | None = None) -> Tensor:
            if not self._dealing:
                self._kept.setdefault(acm.name, []).append(choose(x_TD, shape, said))
                return self._kept[acm.name][-1]
            k_T, mask_T = self._kept[acm.name].pop(0).clone(), acm.mask_of(shape)
            real = torch.arange(len(k_T)) if mask_T is None else mask_T.nonzero()[:, 0].cpu()
            order = real[torch.randperm(len(real), generator=self.drawn)]
            k_T[real.to(k_T.device)] = k_T[order.to(k_T.device)]
            return k_T

        return kept_or_dealt


class Static(Converted):
    """The control of *gates*: every token runs the same k, without a gate.

    Between the costs of two k, one runs on a part of the examples and the other on the rest; scores and MACs are those
    to be expected.
    """

    title = "width: every token the same k"

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """The lowest k everywhere, without gates."""
        return _cost_of(plan, 0)

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Load the same model."""
        super().convert(budgets, say)
        plan = self.subject.plan
        low, most = min(site.k_min for site in plan.sites), max(site.learners for site in plan.sites)
        self.costs = [(k, _cost_of(plan, k)) for k in range(low, most + 1)]
        self._of_batch: tuple[Batch | None, dict[int, BatchResult]] = (None, {})

    def reaches(self, budget: float) -> bool:
        """True from the lowest k on."""
        return budget >= self.costs[0][1]

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """The two k whose costs enclose the budget, each for its part of the examples."""
        right = bisect_right([cost for _, cost in self.costs], budget)
        if right == len(self.costs):
            return self._at(batch, self.costs[-1][0])
        (low, below), (high, above) = self.costs[right - 1], self.costs[right]
        part = (budget - below) / (above - below)
        a, b = self._at(batch, low), self._at(batch, high)
        return BatchResult((1 - part) * a.score_B + part * b.score_B, (1 - part) * a.macs_B + part * b.macs_B)

    def _at(self, batch: Batch, k: int) -> BatchResult:
        if self._of_batch[0] is not batch:
            self._of_batch = (batch, {})
        done = self._of_batch[1]
        if k not in done:
            set_k(self.model, k)
            score_B, usage = self._forward(batch)
            done[k] = BatchResult(score_B, usage.kept_macs + usage.learner_macs[0])
        return done[k]


def _cost_of(plan: Plan, k: int) -> float:
    """The share of the dense model's MACs when every token runs k learners and no gate."""
    cost = plan.cost
    return (cost.fixed_macs + cost.least_share(k) * cost.learner_macs) / plan.model.dense_macs


def in_percent(budget: float) -> str:
    """A budget, a share of the dense model's MACs, as `acm.set_budget` reads it."""
    return f"{100 * budget:.6g}%"
