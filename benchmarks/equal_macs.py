"""A converted model and other methods at the same shares of the MACs of a plan's sites, on the same texts.

Scores at a share lie on a straight line between two settings, of perplexity its log; gates count. Our own comes twice:
gates alone, which save in every call, and with small values skipped as well, which saves where a token is computed at a
time, as masks of single values do. 95 % intervals over files; differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.baselines.acms import Converted
from acm_compiler.baselines.choose_methods import METHODS
from acm_compiler.baselines.measure import Measured, measure, result_of
from acm_compiler.baselines.method import BatchResult, Method, Subject
from acm_compiler.baselines.site_method import Dense
from acm_compiler.data import Batch
from acm_compiler.evaluation.results import Interval
from acm_compiler.evaluation.statistics import Sample, Spent, at_share
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Progress, Say
from acm_compiler.tasks import Task

SHARES = (0.75, 0.6, 0.5, 0.4, 0.25)
FITTED = 16  # batches that other methods are fitted on
# places between what the sites cost at k = N and nothing, and what of that is skipped: values first, then learners, too
PATH = ((1.0, 0.1), (1.0, 0.2), (0.9, 0.25), (0.75, 0.3), (0.5, 0.3), (0.3, 0.3))

GATES, SKIPPED = "gates alone", "small values skipped"
# what saves when
_EVERY_CALL, _ONE_TOKEN = "which save in every call", "which saves where a token is computed at a time"


class Ours(Converted):
    """A converted model at budgets of its learners' MACs."""

    def __init__(self, subject: Subject, model: nn.Module) -> None:
        super().__init__(subject)
        self.model = model

    def reaches(self, budget: float) -> bool:
        """True: whoever asks has chosen among those that the model reaches."""
        return True

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward at a budget."""
        acm.set_budget(self.model, budget)
        score_B, usage = self._forward(batch)
        return BatchResult(score_B, usage.macs)


class Skipping(Ours):
    """The same at the places of `PATH`, by their number."""

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward at a place."""
        budget, skipped = PATH[int(budget)]
        acm.set_sparsity(self.model, skipped, calls="all")
        try:
            return super().run(batch, budget)
        finally:
            acm.set_sparsity(self.model, None)


class Rivals:
    """Methods measured on one model and one set of texts, beside the dense model.

    fit: batches to fit methods on, of which the first are taken; held_out: those to judge by, the same ones every time.
    shares: those of the MACs of the plan's sites.
    """

    def __init__(
        self,
        dense: nn.Module,
        plan: Plan,
        task: Task,
        *,
        fit: Callable[[], Iterable[Batch]],
        held_out: Callable[[], Iterable[Batch]],
        shares: Sequence[float] = SHARES,
    ) -> None:
        self.subject = Subject(
            dense=dense.eval(), plan=plan, task=task, fit=lambda: islice(fit(), FITTED), held_out=held_out
        )
        self.shares = sorted(shares, reverse=True)
        self.part = 1 - plan.cost.fixed_macs / plan.model.dense_macs
        self.dense = _run("dense", Dense(self.subject), (1.0,))
        self.sample = Sample(task=task, units_E=self.dense.units_E, groups_E=self.dense.groups_E)
        self.settings: dict[str, list[Spent]] = {}

    def measure(self, name: str, say: Say) -> Iterator[str]:
        """A row of Markdown for every share that the method of this name is asked for."""
        budgets = {1 - self.part * (1 - share): share for share in self.shares}
        method = METHODS[name](self.subject)
        method.convert(list(budgets), say)
        found = _run(name, method, list(budgets))
        self.settings[name] = [*self._spent(found), Spent(share=1.0, score_E=self._dense_E)]
        for row in result_of(name, METHODS[name], found, sample=self.sample, dense=self.dense, ours=None).rows:
            moved = part_of(row.metric - row.difference.mean, row.difference)
            reached = f"{self._share(row.cost.macs):.3f} | {row.cost.share:.1%}"
            yield f"| {name}, {budgets[row.budget]:g} | {reached} | {row.metric:.2f} | {moved} | |"

    def read_off(self, model: nn.Module) -> Iterator[str]:
        """Rows of Markdown: excess of `model` and of all measured before at each share, and how far behind they are."""
        lowest = conversion(model).table_min
        # gates cost something, so what spends the least share on learners and gates is a lower budget
        wanted = sorted({self.shares[-1] * 0.8, *self.shares, 1.0})
        budgets = [budget for budget in wanted if budget >= lowest]
        gates = self._spent(_run("ours", Ours(self.subject, model), budgets))
        shown: dict[str, list[Spent]] = {f"ours, {GATES}, {_EVERY_CALL}": gates}
        if conversion(model).value_sizes:
            left = [budget * (1 - skipped) for budget, skipped in PATH]
            first = max((place for place, share in enumerate(left) if share > self.shares[0]), default=0)
            last = next((place for place, share in enumerate(left) if share < self.shares[-1]), len(PATH) - 1)
            places = [place for place in range(first, last + 1) if PATH[place][0] >= lowest]
            skipping = self._spent(_run("ours", Skipping(self.subject, model), places))
            shown[f"ours, {SKIPPED}, {_ONE_TOKEN}"] = [*skipping, gates[-1]]  # all learners, nothing skipped
        ours = tuple(shown.values())
        yield "| at a share of the MACs of the sites | " + " | ".join(f"{share:g}" for share in self.shares) + " |"
        yield "| --- |" + " --- |" * len(self.shares)
        for name, settings in (shown | self.settings).items():
            yield f"| {name} | " + " | ".join(self._excess(settings, share) for share in self.shares) + " |"
            for own, against in zip(ours, (GATES, SKIPPED), strict=False):
                if name in self.settings:
                    cells = (self._behind(settings, own, share) for share in self.shares)
                    yield f"| {name}, less ours, {against} | " + " | ".join(cells) + " |"

    def _spent(self, found: Measured) -> list[Spent]:
        means = {budget: float(macs_E.double().nanmean()) for budget, macs_E in found.macs.items()}
        return [Spent(share=self._share(means[budget]), score_E=score_E) for budget, score_E in found.scores.items()]

    def _share(self, macs: float) -> float:
        """The share of the MACs of the sites that is left where a whole example costs so many."""
        return 1 - (1 - macs / float(self.dense.macs[1.0].double().nanmean())) / self.part

    @property
    def _dense_E(self) -> Tensor:
        return self.dense.scores[1.0]

    def _excess(self, settings: Sequence[Spent], share: float) -> str:
        score_E = at_share(settings, share)
        return "" if score_E is None else self._cell(score_E, self._dense_E)

    def _behind(self, settings: Sequence[Spent], own: Sequence[Spent], share: float) -> str:
        theirs_E, ours_E = at_share(settings, share), at_share(own, share)
        return "" if theirs_E is None or ours_E is None else self._cell(theirs_E, ours_E)

    def _cell(self, score_E: Tensor, from_E: Tensor) -> str:
        return part_of(self.sample.value(self._dense_E), self.sample.difference(score_E, from_E))


def _run(name: str, method: Method, budgets: Sequence[float]) -> Measured:
    with Progress(name, shown=False) as work:
        return measure(method, budgets, work)


def part_of(dense: float, change: Interval | None) -> str:
    """A change of perplexity and its 95 % interval, as parts of the dense model's."""
    if change is None:
        return ""
    return f"{change.mean / dense:+.2%} ({change.low / dense:+.2%} to {change.high / dense:+.2%})"
