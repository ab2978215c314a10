"""Measuring one model at several budgets: its metric, and its cost.

Every batch is loaded once and run in every setting, so that all of them, and the dense model, see the same examples.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.data import Batch, refuse_no_batches
from acm_compiler.data.batch import sources_of
from acm_compiler.errors import DataError, NoDenseRegion, UsageError, check_bool, counted
from acm_compiler.evaluation.results import BudgetResult, DenseFrom, Evaluation, FixedResult, MetricResult
from acm_compiler.evaluation.statistics import Sample, against_fixed
from acm_compiler.evaluation.tally import Tally
from acm_compiler.passes.capture.forward import output_of
from acm_compiler.passes.rewrite.conversion import conversion, refuse_no_module, rewritten, sites
from acm_compiler.passes.rewrite.dense_region import dense_regions_run
from acm_compiler.planning.plan import Plan
from acm_compiler.recipe.resolved import measured_with
from acm_compiler.recipe.schema import BudgetsConfig
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.budgets import TOLERANCE, list_of_budgets, parse_budget, share_within
from acm_compiler.runtime.control import FixedK, set_budget, set_k
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.runtime.usage import record
from acm_compiler.sources.inputs import in_mode
from acm_compiler.tasks import Score, Task, batch_for, task_for

Setting = float | str | FixedK
_LOG = logging.getLogger(__name__)
_SAME_BUDGET = 6  # decimals


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    task: Task | str | Mapping[str, Any] | None = None,
    *,
    metric: Score | None = None,
    lower_is_better: bool = False,
    budgets: Sequence[Setting] | None = None,
    fixed_k: bool | None = None,
    dense: nn.Module | None = None,
) -> Evaluation:
    """Measure the metric and the MACs of a rewritten `model` at several budgets, in one pass over `batches`.

    `print` of the result is the table of `acmc eval`; `acm.report` draws it. MACs are modelled from the learners that
    these examples ran, by their own lengths; a budget in "%" or GMACs speaks of the plan's.

    batches: as a loader gives them: mappings of tensors, which the model takes by name, or pairs (inputs, label).
    task: "classify", "causal_lm", "embed", …, a section as in a recipe, or an object with the methods of a task.
    metric: in place of a task, a function of (output, batch) that gives one score per example, [B]. The batch is a
    mapping, in which a pair's are called `image` and `label`, and `labels` go by either name. One whose name ends in
    accuracy is shown in percent.
    budgets: shares of learner MACs, or texts as `acm.set_budget` takes them; None: those of .25, .4, .6, .75 and 1
    that the model reaches. fixed_k: measure every token at the same k, too, for each k, as the control of the gates;
    None: where no budgets are given.
    dense: the model before conversion, to compare with. None: the dense regions are run inside today's trunk where
    they are kept, which is the original model as long as the trunk was not trained; else nothing is compared.
    Mode, choices and budget of the model come back at the end. An example is grouped by `batch["source"]`, if any.
    Raises UsageError, DataError without examples, and before the first batch BudgetUnreachable, NoBudgetTable,
    SitesNotFitted.
    """
    check_bool(lower_is_better, "lower_is_better")
    dataset = getattr(batches, "dataset", None)
    judge = task_for(task, metric, lower_is_better=lower_is_better, dataset=dataset, model=model)
    runs = _Runs(model, judge, dense)
    refuse_no_batches(batches)
    reported = BudgetsConfig().report
    settings: list[Setting] = list_of_budgets(
        reachable(model, reported, say=_LOG.warning) if budgets is None else budgets
    )
    if fixed_k is not None and not isinstance(fixed_k, bool):
        fix = "acm.set_k(model, k) and a loop of your own measure one k alone"
        raise UsageError("fixed_k must be True, False or None", found=repr(fixed_k), fix=fix)
    if fixed_k or (fixed_k is None and budgets is None):
        settings += every_k(model)
    with undisturbed(rewritten(model)), nullcontext() if dense is None else in_mode(dense, training=False):
        # a budget that cannot be set is refused before any data is read
        plan = conversion(model).plan
        tallies = _tallies(model, _distinct(settings, plan), plan)
        run_once = {tally: setting for setting, _, tally in tallies}
        for batch in batches:
            on_device = runs.take(batch)
            for tally, setting in run_once.items():
                _apply(model, setting)
                runs.measure(on_device, tally)
    return _evaluation(runs, tallies)


def reachable(model: nn.Module, budgets: Sequence[float], *, say: Callable[[str], None]) -> list[float]:
    """Those of `budgets` that the model's gates can reach; all learners where none is given or no gate was measured.

    `say` takes a line on what is excluded.
    """
    owner = conversion(model)
    if owner.table is None:
        say("no phase has measured this model's gates: the only budget is 1, all learners")
        return [1.0]
    near = [budget for budget in budgets if share_within(budget, owner.plan, low=owner.table_min) is not None]
    if len(near) < len(budgets):
        say(f"budgets below {owner.table_min:.3f} are out of this model's reach, and left out")
    return near or [1.0]


def every_k(model: nn.Module) -> tuple[FixedK, ...]:
    """Every k that all tokens can be made to run, from the smallest k_min to the largest N; none without learners."""
    acms = sites(model).values()
    if any(acm.state == "dense" for acm in acms):
        return ()
    return tuple(FixedK(k) for k in range(min(acm.k_min for acm in acms), max(acm.count for acm in acms) + 1))


def _distinct(settings: Sequence[Setting], plan: Plan) -> list[Setting]:
    """The settings without those that ask again for what an earlier one asks for, be it in another unit."""
    known: dict[object, Setting] = {}
    for setting in settings:
        same = setting if isinstance(setting, FixedK) else round(parse_budget(setting, plan), _SAME_BUDGET)
        known.setdefault(same, setting)
    return list(known.values())


def _tallies(model: nn.Module, settings: Sequence[Setting], plan: Plan) -> list[tuple[Setting, float, Tally]]:
    """Each setting, what `_apply` says of it, and its tally; budget 1 and k = N, which run the same, have one tally."""
    most, full, rows = max(site.learners for site in plan.sites), None, []
    for place, setting in enumerate(settings):
        share = setting.k / most if isinstance(setting, FixedK) else parse_budget(setting, plan)
        tally = Tally(plan, seed=place)
        if share >= 1 - TOLERANCE:
            full = tally = full or tally
        rows.append((setting, _apply(model, setting), tally))
    return rows


class _Runs:
    """Runs the two models on batches and keeps what does not depend on the setting."""

    def __init__(self, model: nn.Module, task: Task, dense: nn.Module | None) -> None:
        self.model, self.task, self.dense = model, task, dense
        acms = list(sites(model).values())
        self.device = acms[0].k_lo.device
        if dense is not None:
            refuse_no_module(dense, where="dense")
            if not set(acms).isdisjoint(dense.modules()):
                raise UsageError(
                    "dense must be the model before conversion, got one with the same ACMs",
                    fix="leave it out, to run the dense regions; or give a copy from before acm.rewrite(inplace=True)",
                )
        self.dense_from: DenseFrom | None = "original" if dense is not None else None
        if dense is None and all(acm.dense is not None for acm in acms):
            self.dense_from = "regions"
        self._dense_scores: list[Tensor] = []
        self._dense_kept: list[Tensor] = []
        self.likeness = task.likeness if self.dense_from is not None else None
        self._groups: list[Tensor] = []
        self._units: list[Tensor] = []
        self.masked = False

    def take(self, given: Any) -> Batch:
        """A loader's batch on the model's device, after the dense model has run on it."""
        batch = {name: value.to(self.device) for name, value in batch_for(self.task, given).items()}
        self._groups.append(sources_of(batch, sum(map(len, self._groups))))
        self._units.append(self.task.units(batch).cpu())
        if self.dense_from is not None:
            with _dense_regions(self.model) if self.dense is None else ExitStack():
                output = output_of(self.dense or self.model, self.task.inputs(batch))
            batch = self.task.remember(output, batch)
            self._dense_scores.append(self._score(output, batch))
            if self.likeness is not None:
                self._dense_kept.append(self.likeness.keep(output, batch).cpu())
        return batch

    def measure(self, batch: Batch, tally: Tally) -> None:
        """One forward in the setting that holds now."""
        inputs, mask_BS = self.task.call_arguments(batch)
        with batch_context(self.model, mask=mask_BS), record(self.model) as usage:
            output = output_of(self.model, inputs)
        tally.add(usage, self._score(output, batch), batch)
        if self.likeness is not None:
            tally.keep(self.likeness.keep(output, batch).cpu())
        self.masked |= usage.masked

    def _score(self, output: Any, batch: Batch) -> Tensor:
        """The score of every example of a batch, [B]; DataError where one is not finite: no mean is, then."""
        score_B = self.task.score(output, batch).cpu()
        if broken := int((~score_B.isfinite()).sum()):
            raise DataError(
                f"scores of {self.task.metric} must be finite",
                found=f"nan or infinity at {broken} of {counted(len(score_B), 'example')} of a batch",
                fix="look for such values in the data and in what the model gives, or run it in a wider floating type; "
                "examples that do not count have units of 0 and any number for a score",
            )
        return score_B

    @property
    def sample(self) -> Sample:
        """Units of every example, and its source; DataError without examples."""
        if not self._groups:
            raise DataError("batches must hold at least one example, got none", fix="a generator can be read only once")
        units_E = torch.cat(self._units)
        if not units_E.any():
            raise DataError(
                "examples must hold something to score, got padding alone",
                found=f"{counted(len(units_E), 'example')} of 0 units of {self.task.metric}",
                fix="give longer texts, and an attention_mask that is 1 at real tokens",
            )
        return Sample(task=self.task, units_E=units_E, groups_E=torch.cat(self._groups))

    @property
    def dense_scores(self) -> Tensor | None:
        """The dense model's score of each example, [E]."""
        return torch.cat(self._dense_scores) if self._dense_scores else None

    def likeness_of(self, tally: Tally) -> float | None:
        """Agreement with the dense model's outputs; None where that is not known."""
        return None if self.likeness is None else self.likeness.compare(tally.kept, torch.cat(self._dense_kept))


def _apply(model: nn.Module, setting: Setting) -> float:
    """Set it; returns the share of learner MACs that a budget's table expects, or k."""
    if isinstance(setting, FixedK):
        set_k(model, setting.k)
        return setting.k
    expected = set_budget(model, setting)
    assert isinstance(expected, float)  # one budget, not one per phase
    return expected


def _evaluation(runs: _Runs, tallies: Sequence[tuple[Setting, float, Tally]]) -> Evaluation:
    sample, dense_E = runs.sample, runs.dense_scores
    budgets, fixed = [], []
    controls = [tally.spent for setting, _, tally in tallies if isinstance(setting, FixedK)]
    plan = conversion(runs.model).plan
    for setting, expected, tally in tallies:
        found = tally.result(sample, dense_E) | {"likeness": runs.likeness_of(tally)}
        if isinstance(setting, FixedK):
            fixed.append(FixedResult(k=setting.k, **found))
        else:
            over_fixed = against_fixed(tally.spent, controls, sample)
            asked, asked_as = parse_budget(setting, plan), setting if isinstance(setting, str) else None
            budgets.append(
                BudgetResult(asked=asked, asked_as=asked_as, expected=expected, over_fixed=over_fixed, **found)
            )
    return Evaluation(
        metric=MetricResult(
            name=runs.task.metric,
            lower_is_better=runs.task.lower_is_better,
            is_share=runs.task.is_share,
            dense=None if dense_E is None else sample.value(dense_E),
            dense_error=None if dense_E is None else sample.error(dense_E),
            dense_from=runs.dense_from,
            likeness=None if runs.likeness is None else runs.likeness.name,
        ),
        budgets=tuple(budgets),
        fixed=tuple(fixed),
        n=len(sample.groups_E),
        groups=len(sample.groups_E.unique()),
        masked=runs.masked,
        model=plan.model.cls,
        dense_macs=tallies[0][2].dense_macs if tallies else plan.model.dense_macs / plan.model.batch,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions=measured_with(),
    )


@contextmanager
def _dense_regions(model: nn.Module) -> Iterator[None]:
    """While open, every ACM runs the dense region it replaced. NoDenseRegion where one is gone."""
    acms = list(sites(model).values())
    tapped = next((acm.name for acm in acms if acm.tap is not None), None)
    if tapped is not None:
        raise NoDenseRegion("another phase is looking into this model now", where=tapped, fix="evaluate after it")
    with dense_regions_run(acms):
        yield
