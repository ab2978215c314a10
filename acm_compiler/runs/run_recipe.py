"""The main job: carry out a recipe, from a trained model to a saved model that serves every budget."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import nn

from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options
from acm_compiler.calibration.quantized.quantize import quantize_on
from acm_compiler.checkpoint import save
from acm_compiler.data import BatchStream, count_examples
from acm_compiler.data.batch import Facts
from acm_compiler.errors import DataError, UsageError, counted
from acm_compiler.evaluation.results import Evaluation, load_evaluation, save_evaluation
from acm_compiler.passes.rewrite.conversion import EvaluatedBudget, conversion, rewritten
from acm_compiler.planning.check_schedule import check_phase
from acm_compiler.progress import Progress, Say, duration
from acm_compiler.recipe import Recipe, decisions, expand_paths, resolved_yaml
from acm_compiler.recipe.datasets import DataSection, plain
from acm_compiler.recipe.phases import CalibratePhase
from acm_compiler.runs.folder import (
    RunOptions,
    as_run_interrupted,
    check_run_folder,
    describe_existing,
    drop_measured,
    judged,
    one_run,
    still_to_come,
    subject_of,
)
from acm_compiler.runs.opened import OpenedRecipe, with_progress
from acm_compiler.runs.pipeline import convert
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.budgets import setting_of
from acm_compiler.runtime.control import set_budget
from acm_compiler.runtime.measure_budgets import measure_budgets, undisturbed
from acm_compiler.runtime.quantized_linear import choose_rest
from acm_compiler.runtime.site_status import status
from acm_compiler.runtime.usage import record
from acm_compiler.sources.from_hf import processor_files
from acm_compiler.sources.inputs import Example, call_model
from acm_compiler.tasks import Task
from acm_compiler.tasks.base import base_metric
from acm_compiler.training.machine import Machine, open_machine
from acm_compiler.training.phase import Job
from acm_compiler.training.schedule import run_schedule
from acm_compiler.training.state import discard_state, has_state

_MEASURED_EXAMPLES = 512
_WATCHED_EXAMPLES = 1024


def run_recipe(recipe: Recipe, options: RunOptions, *, say: Say) -> Evaluation | None:
    """load -> plan -> rewrite -> the schedule's phases -> evaluate -> save; the evaluation, None without task and data.

    An earlier result in the folder is refused, but for `force`, and even then stays until the new one is complete,
    but for `state/` and `metrics.jsonl`; with `resume` that of the same recipe is returned as it is. Raises every
    AcmError that its steps raise, and BudgetMissed under `strict_budget`.
    """
    recipe = expand_paths(recipe)
    check_phase(options.until, recipe.schedule)
    machine = open_machine(recipe.run.precision, recipe.run.device, sharded=recipe.run.sharded)
    with one_run(options.directory, machine, say):
        return _run_alone(recipe, options, machine, say)


def _run_alone(recipe: Recipe, options: RunOptions, machine: Machine, say: Say) -> Evaluation | None:
    """Carry out `run_recipe`, once no other run is in its folder."""
    if check_run_folder(recipe, options):
        say("finished before, and left as it is; --force does it again")
        return judged(load_evaluation(options.directory), options)
    if before := describe_existing(options):
        say(before)
    if recipe.run.threads is not None:
        torch.set_num_threads(recipe.run.threads)
    run = RecipeRun(recipe, machine, say)
    dense, model = run.prepare(options, report=say)
    done = 0
    if recipe.schedule:
        done = run_schedule(model, recipe.schedule, run.job(options), resume=options.resume, until=options.until)
    if done == len(recipe.schedule):
        run.quantize(model)  # in all processes: they measure budgets together
    if not machine.is_main:
        return None
    with as_run_interrupted(options):
        evaluation = run.judge(model, dense) if options.judge and recipe.data and recipe.task else None
    if evaluation is not None:
        _note_budgets(model, evaluation)
    save(model, options.directory, extra={"recipe.yaml": resolved_yaml(recipe), **processor_files(recipe.model)})
    if evaluation is not None:
        evaluation = replace(evaluation, subject=subject_of(options.directory, run.given.data, run.given.task))
        save_evaluation(options.directory, evaluation)
    drop_measured(options.directory, say, evaluated=evaluation is not None)
    if left := recipe.schedule[done:]:
        say(still_to_come([config.phase for config in left], options))
    else:
        discard_state(options.directory)
    return judged(evaluation, options)


class RecipeRun(OpenedRecipe):
    """Task, data and the calls between them that a recipe's phases and its evaluation need."""

    recipe: Recipe

    def __init__(self, recipe: Recipe, machine: Machine, say: Say) -> None:
        super().__init__(recipe)
        self.machine, self.say = machine, say
        self.model: nn.Module | None = None

    @property
    def data(self) -> DataSection:
        """The recipe's data. UsageError when it has none."""
        if self.recipe.data is None:
            raise UsageError("phases and evaluation need data", where=self.recipe.name, fix="write a `data:` section")
        return self.recipe.data

    @functools.cached_property
    def task(self) -> Task:
        """The recipe's task, for the dense model once there is one. UsageError when it has none."""
        return self.open_task(self.data.train, self.model)

    def prepare(self, options: RunOptions, *, report: Say) -> tuple[nn.Module, nn.Module]:
        """Prepare the first phase: the dense model and its rewritten copy; `report` is given the plan.

        What is wrong with data, task, model or weights is refused here, before any training. A dry run ends here.
        """
        complete = self.recipe.data is not None and self.recipe.task is not None
        if complete:
            self._check_data()
        self.model, model = convert(self.recipe, report)
        if (wanted := self.run.quantized) is not None and wanted.rest:
            choose_rest(rewritten(model), wanted.include, wanted.exclude, wanted.weights)
        self.image_size = conversion(model).plan.model.image_size
        if complete:
            self._check_inputs()
        if not (options.resume and has_state(options.directory)):
            self._expect(self.model)
        return self.model, model

    def _check_data(self) -> None:
        """Open the data sets, see that they fill the phases' batches, and read an example of each."""
        train, held_out = self.dataset(self.data.train), self.dataset(self.data.eval)
        ours, theirs = Facts.of(train).classes, Facts.of(held_out).classes
        if ours is not None and theirs is not None and list(ours) != list(theirs):
            raise DataError(
                "the classes of data.eval are not those of data.train",
                where=self.recipe.name,
                found=_difference(theirs, ours) or "another order",
                fix="give both the same class folders",
            )
        for phase in self.recipe.schedule:
            self._stream(batch=phase.loaded_batch, world=self.machine.world)
        for config in (self.data.train, self.data.eval):
            self.example(config, self.machine.device)

    def _check_inputs(self) -> None:
        """Open the task, and make the model's inputs and mask of one example of each data set."""
        for config in (self.data.train, self.data.eval):
            batch = self.example(config, self.machine.device)
            self.task.inputs(batch)
            self.task.mask(batch)

    def _expect(self, dense: nn.Module) -> None:
        """Refuse a dense model that is not what the recipe expects, if it does. UnexpectedMetric.

        Without that, refuse one that does not run on the data, or whose output is not the task's: by one example.
        """
        wanted = self.recipe.expect
        if wanted is None:
            if self.recipe.data is not None and self.recipe.task is not None and self.run.offload is None:
                example = self.example(self.data.eval, self.machine.device)
                base_metric(dense.to(self.machine.device), [example], self.task)
            return
        examples = self.first(self.data.eval, wanted.examples, self.machine.device)
        found = base_metric(dense.to(self.machine.device), with_progress(examples, "dense model"), self.task)
        self.check_expected(found)
        self.say(f"the dense model's {self.task.metric} is {found:.4g}, expected {wanted}")

    def check_expected(self, found: float) -> None:
        """Refuse a metric of the dense model that is not what the recipe expects, if it does. UnexpectedMetric."""
        if self.recipe.expect is not None:
            self.recipe.expect.refuse_other(found, metric=self.task.metric, where=self.recipe.place("expect"))

    def job(self, options: RunOptions) -> Job:
        """The job of the schedule."""
        return Job(
            task=self.task,
            data=self._stream,
            run=self.recipe.run,
            directory=options.directory,
            budget=self.recipe.budgets.train,
            teacher=self.model,
            decisions=decisions(self.recipe),
            resume_command=options.resume_command,
            measure=self.measure_budgets,
            calibrate=self.calibrate,
            evaluate=self.watch,
            say=self.say,
            on_phase_end=lambda _, phase, seconds: self.say(f"phase {phase.phase} done in {duration(seconds)}"),
        )

    def measure_budgets(self, model: nn.Module, k_lo: int = 0) -> None:
        """Find the knob of every budget, from a lowest k on, on plain training examples, and set the recipe's own."""
        examples = list(self._training_examples(_MEASURED_EXAMPLES))
        with Progress("budgets", say=self.say, shown=self.machine.is_main) as work:
            measure_budgets(model, examples, budgets=self.recipe.budgets.report, k_lo=k_lo, progress=work)
        set_budget(model, None)

    def quantize(self, model: nn.Module) -> None:
        """Give learners the weights that the recipe asks for, and measure the budgets of what has any on these."""
        if (chosen := self.run.quantized) is None:
            return
        examples = self._training_examples() if chosen.weights == "int4" else None
        rest, include, exclude = chosen.rest, chosen.include, chosen.exclude
        with Progress("quantize", say=self.say, shown=self.machine.is_main) as work:
            quantize_on(model, chosen.weights, examples, rest=rest, include=include, exclude=exclude, progress=work)
        self.say(status(model).weights)
        if (table := conversion(model).table) is not None:
            self.measure_budgets(model, table.points[0].k_lo)  # calibration may have found that none is too few

    def calibrate(self, model: nn.Module, phase: CalibratePhase, examples: Iterator[Example]) -> None:
        """Fit learners, gates and budget table in closed form, and set the recipe's own budget."""
        options = Options(
            tokens=phase.tokens,
            gradient_tokens=phase.gradient_tokens,
            backward_passes=phase.backward_passes,
            local_steps=phase.local_steps,
            budgets=self.recipe.budgets.report,
            answer=self.task.judged_by,
            offload=self.run.offload,
            precision=self.run.precision,
        )
        with Progress("calibrate", say=self.say, shown=self.machine.is_main) as work:
            calibrate_on(model, examples, options=options, progress=work)

    def _training_examples(self, count: int | None = None) -> Iterator[Example]:
        """So many examples to train on, None for all, drawn at random, plain, as inputs and padding mask."""
        config = plain(self.data.train)
        for batch in self.first(config, count or count_examples(self.dataset(config)), self.machine.device):
            yield self.task.call_arguments(batch)

    def watch(self, model: nn.Module) -> Mapping[str, Any]:
        """The metric and the budget that the gates reach as they are, on some held-out examples."""
        scores, units, shares = [], [], []
        with undisturbed(rewritten(model)):
            for batch in self.first(self.data.eval, _WATCHED_EXAMPLES, self.machine.device):
                if self.task.needs_dense and self.model is not None:
                    batch = self.task.remember(call_model(self.model, self.task.inputs(batch)), batch)
                inputs, mask_BS = self.task.call_arguments(batch)
                with batch_context(model, mask=mask_BS), record(model, macs=False) as usage:
                    scores.append(self.task.score(call_model(model, inputs), batch))
                units.append(self.task.units(batch).to(self.machine.device))
                shares.append(usage.real_shares)
        value = self.task.value(torch.cat(scores), torch.cat(units))
        return {self.task.metric: value, "budget": float(torch.cat(shares).mean())}

    def judge(self, model: nn.Module, dense: nn.Module) -> Evaluation:
        """The finished model at every budget of the recipe, beside the dense one and beside every fixed k."""
        began, on = monotonic(), dense.to(self.machine.device)
        found = self.measure(model, on, self.task, say=self.say, note=self.say, workers=self.run.workers)
        settings = f"{counted(len(found.budgets), 'budget')}, at {len(found.fixed)} fixed k, and dense"
        self.say(f"evaluate: {counted(found.n, 'example')} at {settings}, {duration(monotonic() - began)}")
        return found

    def _stream(self, **sizes: int) -> BatchStream:
        """Training batches. DataError or UsageError where the data set or the processes cannot fill them."""
        workers, train = self.run.workers, self.dataset(self.data.train)
        return BatchStream(dataset=train, shuffle=True, drop_last=True, workers=workers, **sizes)


def _difference(found: Sequence[str], expected: Sequence[str]) -> str:
    extra, missing = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    parts = [
        f"{word} {', '.join(names[:3])}" for word, names in (("only here:", extra), ("missing:", missing)) if names
    ]
    return "; ".join(parts)


def _note_budgets(model: nn.Module, evaluation: Evaluation) -> None:
    """Keep what the model reached at each budget beside its table, so that it is saved with it."""
    owner = conversion(model)
    if owner.table is not None:
        evaluated = tuple(
            EvaluatedBudget(asked=b.asked, knob=setting_of(owner, b.asked).knob, reached=b.reached, metric=b.metric)
            for b in evaluation.budgets
        )
        owner.table = replace(owner.table, evaluated=evaluated)
