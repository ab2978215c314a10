"""A comparison carried out: one dense model made cheaper by each method, all measured on the same held-out examples."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import monotonic

import torch

from acm_compiler.baselines.choose_methods import OURS, Chosen, choose, method_named
from acm_compiler.baselines.measure import LEVELS, Measured, Scores, levels_of, measure, measure_corrupted, result_of
from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.site_method import Dense
from acm_compiler.checkpoint import check_own_folder, save_id
from acm_compiler.data import Batch, BatchStream
from acm_compiler.data.batch import real_length
from acm_compiler.errors import RunInterrupted, UsageError
from acm_compiler.evaluation.comparison import ACM, Comparison, save_comparison
from acm_compiler.evaluation.results import MetricResult
from acm_compiler.evaluation.statistics import Sample
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Progress, Say, duration
from acm_compiler.recipe import Recipe, decisions, expand_paths
from acm_compiler.recipe.datasets import plain
from acm_compiler.recipe.resolved import measured_with
from acm_compiler.runs.folder import RunOptions, check_run_folder, one_run
from acm_compiler.runs.opened import OpenedRecipe
from acm_compiler.runs.pipeline import check_recipe, plan_recipe
from acm_compiler.runs.run_recipe import RecipeRun, run_recipe
from acm_compiler.sources.build import build
from acm_compiler.training.machine import Machine, open_machine
from acm_compiler.training.phase import Job
from acm_compiler.training.state import discard_state

BUDGETS = (0.25, 0.4, 0.5, 0.6, 0.75)
_DENSE = "dense"
STEPS = 600
_FITTED, _QUICK, _READ = 2048, 1200, 256  # examples to fit to, for a first look, and to find their length


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a comparison: its folder, its methods and budgets (None: the usual ones).

    ablations: of the paper's phases, as further methods. steps: optimizer steps of every model that a method trains.
    quick: fewer held-out examples. corruptions: measure corrupted images, too. force: start over. command: what an
    interrupted user is told to type.
    """

    directory: Path
    methods: Sequence[str] | None = None
    ablations: Sequence[str] | None = None
    budgets: Sequence[float] | None = None
    steps: int = STEPS
    quick: bool = False
    corruptions: bool = False
    force: bool = False
    command: str = "acmc compare"


def compare(recipe: Recipe, options: Options, *, say: Say) -> Comparison:
    """Refuse what cannot be; convert by the recipe; fit and measure one method after the other; write what was found.

    A finished method is kept in the folder, and a comparison that was killed goes on with the next one. UsageError for
    what is refused, before anything is written; else the errors of `run_recipe`.
    """
    recipe = expand_paths(recipe)
    if recipe.data is None or recipe.task is None:
        raise UsageError("a comparison needs data and a task", where=recipe.name, fix="write `data:` and `task:`")
    typical = _with_typical_input(recipe)
    built, plan, _ = plan_recipe(typical)
    check_recipe(recipe, built.model, plan)
    if options.corruptions:
        _refuse_no_images(recipe)
    chosen = choose(
        built.model,
        plan,
        names=options.methods,
        ablations=options.ablations,
        budgets=options.budgets,
        usual=BUDGETS,
    )
    belongs_to = {"recipe": decisions(recipe), "quick": options.quick}
    if typical.input is not None and typical.input != recipe.input:
        belongs_to["budgets_at"] = typical.input.model_dump(mode="json")
    scores = Scores(directory=options.directory, of=belongs_to)
    machine = open_machine(recipe.run.precision, recipe.run.device)
    if machine.world > 1:
        found = f"{machine.world} processes"
        raise UsageError("a comparison must run in one process", found=found, fix="start it without torchrun")
    check_own_folder(options.directory)
    run_options = RunOptions(
        directory=options.directory, resume=True, force=options.force, judge=False, resume_command=options.command
    )
    check_run_folder(recipe, run_options)
    if not options.force:
        scores.check()
    if any(name in OURS for name in chosen.budgets):
        run_recipe(recipe, run_options, say=say)
    with one_run(options.directory, machine, say):
        scores.begin(anew=options.force)
        return _Comparing(typical, plan, options, machine, scores, say).run(chosen)


def _with_typical_input(recipe: Recipe) -> Recipe:
    """The recipe with an example as long as its training examples are: budgets are shares of what these cost."""
    given, data = recipe.input, recipe.data
    if data is None or given is None or (given.tokens is None and given.audio_seconds is None):
        return recipe
    run, dataset = recipe.run, OpenedRecipe(recipe).dataset(plain(data.train))
    stream = BatchStream(dataset=dataset, batch=1, seed=run.seed, shuffle=True, count=_READ)
    sizes = [real_length(batch) for batch in stream.epoch()]
    # of the MACs most are done for long examples
    length = sum(size * size for size in sizes) / max(1, sum(sizes))
    if not length:
        return recipe
    seconds = given.audio_seconds and round(length / given.sample_rate, 2)
    own = given.model_copy(update={"tokens": given.tokens and round(length), "audio_seconds": seconds})
    return recipe.model_copy(update={"input": own})


def _refuse_no_images(recipe: Recipe) -> None:
    """UsageError where the held-out examples are no images."""
    opened = OpenedRecipe(recipe)
    if "image" not in (example := next(opened.first(opened.held_out, 1, torch.device("cpu")))):
        what = "corruptions are for images"
        raise UsageError(what, where="--corruptions", found=f"examples of {', '.join(example)}", expected="an `image`")


class _Comparing:
    """The methods of one comparison, on a model and data that are opened once."""

    def __init__(
        self, recipe: Recipe, plan: Plan, options: Options, machine: Machine, scores: Scores, say: Say
    ) -> None:
        if recipe.run.threads is not None:
            torch.set_num_threads(recipe.run.threads)
        self.recipe, self.plan, self.options = recipe, plan, options
        self.machine, self.scores, self.say = machine, scores, say
        self.opened = RecipeRun(recipe, machine, say)
        self.opened.image_size = plan.model.image_size
        self.corrupted: dict[str, Measured] = {}
        self.corrupted_at: float | None = None

    def run(self, chosen: Chosen) -> Comparison:
        """Measure the dense model, then each method, and write the comparison."""
        for name, reason in chosen.left_out.items():
            self.say(f"left out: {name}: {reason}")
        subject = self._subject()
        if self.options.corruptions:
            asked = sorted({budget for budgets in chosen.budgets.values() for budget in budgets})
            self.corrupted_at = asked[len(asked) // 2]
        try:
            found = {_DENSE: self._measured(_DENSE, (1.0,), subject)}
            for name, budgets in chosen.budgets.items():
                found[name] = self._measured(name, budgets, subject)
        except KeyboardInterrupt:
            stopped = "stopped; the methods that were finished are kept"
            raise RunInterrupted(stopped, fix=f"go on with the next one: {self.options.command}") from None
        comparison = self._comparison(found, subject, chosen)
        save_comparison(self.options.directory, comparison)
        return comparison

    def _subject(self) -> Subject:
        """The dense model in eval mode, its plan, and its data."""
        recipe, data = self.recipe, self.recipe.data
        assert data is not None
        torch.manual_seed(recipe.run.seed)
        dense = build(recipe.model, device="cpu", example=recipe.input).model.to(self.machine.device).eval()
        self.opened.model = dense
        return Subject(
            dense=dense,
            plan=self.plan,
            task=self.opened.task,
            fit=lambda: self.opened.first(plain(data.train), _FITTED, self.machine.device),
            held_out=self._held_out,
            folder=self.options.directory,
            seed=recipe.run.seed,
            steps=self.options.steps,
            job=self._job,
            replan=self._planned_with,
        )

    def _job(self, name: str) -> Job:
        """The training of a method, in a folder of its own."""
        folder = self.scores.folder / name.split()[0]
        options = RunOptions(directory=folder, resume=True, resume_command=self.options.command)
        return replace(self.opened.job(options), evaluate=None)

    def _planned_with(self, learners: int) -> Plan:
        """The recipe's plan, had every site so many learners."""
        rules = tuple(rule.model_copy(update={"learners": learners}) for rule in self.recipe.sites)
        return plan_recipe(self.recipe.model_copy(update={"sites": rules}))[1]

    def _held_out(self) -> Iterable[Batch]:
        for batch in self.stream.epoch():
            yield {name: value.to(self.machine.device) for name, value in batch.items()}

    @cached_property
    def stream(self) -> BatchStream:
        """The examples to measure on: all, or a few for a first look."""
        data, run, quick = self.opened.dataset(self.opened.held_out), self.recipe.run, self.options.quick
        count = _QUICK if quick else None
        return BatchStream(dataset=data, batch=run.eval_batch, seed=run.seed, shuffle=quick, count=count)

    def _measured(self, name: str, budgets: tuple[float, ...], subject: Subject) -> Measured:
        """Scores of a method: from the folder, or fitted and measured now."""
        began, kind = monotonic(), Dense if name == _DENSE else method_named(name)
        steps = self.options.steps if kind.trains else 0
        at = 1.0 if name == _DENSE else self.corrupted_at
        corrupted = f"{name}-corrupted-{at}" if self.corrupted_at is not None and at in budgets else None
        before = self.scores.load(corrupted, LEVELS, steps=steps) if corrupted else None
        kept = self.scores.load(name, budgets, steps=steps)
        if kept is not None and (before is not None or corrupted is None):
            self.say(f"{name}: measured before")
            self.corrupted |= {} if before is None else {name: before}
            return kept
        torch.manual_seed(self.recipe.run.seed)
        method = kind(subject)
        method.convert(budgets, self.say)
        fitted = monotonic()
        with Progress(name, len(self.stream), unit="batch", say=self.say) as progress:
            found = measure(method, budgets, progress)
        found = replace(found, steps=steps)
        if corrupted and at in found.scores:
            with Progress(f"{name}, corrupted", unit="batch", say=self.say) as progress:
                self.corrupted[name] = replace(measure_corrupted(method, at, progress), steps=steps)
            self.scores.save(corrupted, self.corrupted[name])
        self.scores.save(name, found)
        discard_state(self.scores.folder / name)
        self.say(f"{name}: fitted in {duration(fitted - began)}, measured in {duration(monotonic() - fitted)}")
        if name == _DENSE:
            self.opened.check_expected(subject.task.value(found.scores[1.0], found.units_E))
        return found

    def _comparison(self, found: dict[str, Measured], subject: Subject, chosen: Chosen) -> Comparison:
        dense, task = found[_DENSE], subject.task
        sample = Sample(task=task, units_E=dense.units_E, groups_E=dense.groups_E)
        metric = MetricResult(
            name=task.metric,
            lower_is_better=task.lower_is_better,
            is_share=task.is_share,
            dense=sample.value(dense.scores[1.0]),
            dense_error=sample.error(dense.scores[1.0]),
            dense_from="original",
        )
        results = [
            result_of(name, method_named(name), found[name], sample=sample, dense=dense, ours=found.get(ACM))
            for name in chosen.budgets
        ]
        return Comparison(
            recipe=self.recipe.name,
            quick=self.options.quick,
            metric=metric,
            methods=tuple(results),
            n=len(dense.groups_E),
            groups=len(dense.groups_E.unique()),
            model=subject.plan.model.cls,
            dense_macs=float(dense.macs[1.0].nanmean()),
            left_out=chosen.left_out,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            versions=measured_with(),
            threads=torch.get_num_threads(),
            save=save_id(self.options.directory) if ACM in found else None,
            corrupted={name: levels_of(part, subject) for name, part in self.corrupted.items()},
            corrupted_at=self.corrupted_at,
        )
