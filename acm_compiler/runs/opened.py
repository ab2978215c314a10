"""A recipe opened once: its task, its data and the measurement, for a run and for a folder that is opened again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from acm_compiler.checkpoint import load, saved_conversion
from acm_compiler.data import Batch, BatchStream, count_examples, left_out, open_dataset
from acm_compiler.data.batch import size_of
from acm_compiler.errors import AcmError, UsageError
from acm_compiler.evaluation.evaluate import Setting, evaluate, every_k, reachable
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.progress import Progress, Say
from acm_compiler.recipe import Recipe, expand_paths, load_recipe
from acm_compiler.recipe.datasets import DataConfig
from acm_compiler.recipe.schema import BudgetsConfig, RunConfig
from acm_compiler.recipe.tasks import TaskConfig
from acm_compiler.runs.folder import evaluation_file, subject_of
from acm_compiler.runs.given import Given, refuse_missing
from acm_compiler.sources.build import build
from acm_compiler.sources.inputs import Inputs, fit_to, make_inputs, parse_input
from acm_compiler.tasks import Task, open_task
from acm_compiler.training.machine import find_device


class OpenedRecipe:
    """A recipe's task and data sets, each opened once, when they are first asked for; None where there is no recipe.

    `given` goes before what the recipe says; `where` and `fix` are for those who named neither task nor data.
    `image_size` is the model's, for images of which the recipe's `input` says nothing.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        given: Given | None = None,
        *,
        where: str = "",
        image_size: tuple[int, int] | None = None,
    ) -> None:
        self.recipe, self.where, self.image_size = recipe, where, image_size
        self.given = (given or Given()).over(recipe)
        self._sets: dict[tuple[str, tuple[int, int] | None], Any] = {}

    @property
    def run(self) -> RunConfig:
        """Settings of the recipe's run; the defaults without one."""
        return self.recipe.run if self.recipe else RunConfig()

    @property
    def task_config(self) -> TaskConfig:
        """The task's section. UsageError where nothing names one."""
        if self.given.task is None:
            raise self._misses("task")
        return self.given.task

    @property
    def held_out(self) -> DataConfig:
        """The section of the data to evaluate on. UsageError where nothing names any."""
        if self.given.data is None:
            raise self._misses("data")
        return self.given.data

    def dataset(self, config: DataConfig) -> Dataset[Any]:
        """The examples of a section. DataError when they are not here."""
        size = (self.recipe.image_size if self.recipe else None) or self.image_size
        key = config.model_dump_json(), size
        if key not in self._sets:
            self._sets[key] = open_dataset(config, image_size=size)
        return self._sets[key]

    def open_task(self, config: DataConfig, model: nn.Module | None) -> Task:
        """The task on the data of a section, for a model."""
        return open_task(self.task_config, self.dataset(config), model)

    def measure(
        self,
        model: nn.Module,
        dense: nn.Module | None,
        task: Task,
        *,
        say: Say,
        note: Callable[[str], None],
        budgets: Sequence[Setting] | None = None,
        examples: int | None = None,
        batch: int | None = None,
        workers: int = 0,
    ) -> Evaluation:
        """The model at each budget and every fixed k, beside the dense one, on the data to evaluate on.

        budgets: None: those of the recipe that the model reaches; `note` is told which it does not. examples: so many,
        drawn at random; None: all. batch: examples per forward; None: the recipe's.
        """
        data = self.dataset(self.held_out)
        if budgets is None:
            budgets = reachable(model, (self.recipe.budgets if self.recipe else BudgetsConfig()).report, say=note)
        size, drawn = batch or self.run.eval_batch, examples is not None
        stream = BatchStream(dataset=data, batch=size, shuffle=drawn, count=examples, workers=workers)
        batches = with_progress(stream.epoch(), "evaluate", total=len(stream), say=say)
        found = evaluate(model, batches, task, budgets=[*budgets, *every_k(model)], dense=dense)
        return replace(found, left_out=left_out(data))

    def first(self, config: DataConfig, count: int, device: torch.device) -> Iterator[Batch]:
        """So many examples of a section, drawn at random, on a device."""
        data, size, seed = self.dataset(config), self.run.eval_batch, self.run.seed
        for batch in BatchStream(dataset=data, batch=size, seed=seed, shuffle=True, count=count).epoch():
            yield {name: value.to(device) for name, value in batch.items()}

    def example(self, config: DataConfig, device: torch.device) -> Batch:
        """One example of a section, the first in its order that can be used. DataError where none can."""
        data, seed = self.dataset(config), self.run.seed
        (batch,) = BatchStream(dataset=data, batch=1, seed=seed, shuffle=True, drop_last=True, count=1).epoch()
        return {name: value.to(device) for name, value in batch.items()}

    def _misses(self, section: str) -> UsageError:
        return UsageError(
            f"no {section} was named",
            where=self.where or (self.recipe.name if self.recipe else None),
            found=f"a recipe without {section}" if self.recipe else "a model saved without a recipe",
            fix="give both: --data python:my_module:my_data --task classify; for an export an example's shape will do: "
            "--input 2x128:int; or from Python, with batches of your own, acm.evaluate(model, batches, task=…), "
            "acm.report and acm.explain",
        )


def with_progress(
    batches: Iterable[Batch], what: str, *, total: int | None = None, say: Say | None = None
) -> Iterator[Batch]:
    """The same batches, with a bar on a terminal and lines to `say` (the log when unset) elsewhere."""
    with Progress(what, total, unit="batch", say=say) as progress:
        for batch in progress.fed(batches):
            yield batch
            progress.advance(examples=size_of(batch))


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A saved model, on the device its recipe names, and the model before conversion, None with `no_dense` saying why.

    `recipe` is None for models that were saved without one; `given` goes before what it says.
    """

    directory: Path
    model: nn.Module
    recipe: Recipe | None
    given: Given
    dense: nn.Module | None
    no_dense: str

    @property
    def name(self) -> str:
        """Name of the run: the recipe's, else the folder's."""
        return self.recipe.name if self.recipe else self.directory.absolute().name

    @property
    def subject(self) -> str | None:
        """Subject of an evaluation of this run; see `Evaluation.subject`."""
        known = self.given.over(self.recipe)
        return subject_of(self.directory, known.data, known.task)

    @cached_property
    def evaluation_file(self) -> str:
        """Name of the file in its folder for evaluations on its data."""
        return evaluation_file(self.directory, self.given, self.recipe)

    def has_measured(self, found: Evaluation) -> bool:
        """True where an evaluation may be of this saved model, on this run's data where they are known."""
        ours, theirs = self.subject, found.subject
        return ours is None or theirs is None or theirs == ours or theirs.startswith(f"{ours}:")

    @cached_property
    def opened(self) -> OpenedRecipe:
        """Its task and data."""
        recipe, size = self.recipe and expand_paths(self.recipe), conversion(self.model).plan.model.image_size
        return OpenedRecipe(recipe, self.given, where=str(self.directory), image_size=size)

    @cached_property
    def data(self) -> Dataset[Any]:
        """The examples to evaluate on. UsageError when nothing names them, DataError when they are not here."""
        return self.opened.dataset(self.opened.held_out)

    @cached_property
    def task(self) -> Task:
        """The task on its data. UsageError when neither recipe nor command line names one."""
        return self.opened.open_task(self.opened.held_out, self.model)

    def example(self) -> Inputs | None:
        """One example of the shape that the recipe's `input` says, or the one tensor of the plan; None without."""
        if self.recipe is None:
            return None
        planned = conversion(self.model).plan.model.inputs
        if (spec := self.recipe.input) is None and (not planned or "," in planned):
            return None
        return fit_to(self.model, make_inputs(self.model, spec or parse_input(planned.replace(" ", ""))))

    def inputs(self, count: int) -> Inputs:
        """The model's inputs for the first `count` evaluation examples, in the model's precision and on its device.

        UsageError when the recipe names no task or data, or the data has fewer examples.
        """
        if (have := count_examples(self.data)) < count:
            raise UsageError(
                "more examples than the data has", found=count, expected=f"at most {have}", fix="name smaller batches"
            )
        batch = next(BatchStream(dataset=self.data, batch=count, drop_last=True).epoch())
        return fit_to(self.model, self.task.inputs(batch))


def open_saved_run(
    directory: Path, *, given: Given | None = None, allow_code: bool = False, device: str | None = None
) -> SavedRun:
    """The run in `directory`, on `device`, None for the recipe's. Nothing named in it is imported unless `allow_code`.

    UsageError for a device that is not here; see `acm.load` for other errors.
    """
    asked = None if device is None else find_device(device, where="--device")
    recipe, given = saved_recipe(directory), given or Given()
    place = asked or find_device(recipe.run.device if recipe else "auto")
    if recipe is not None and not allow_code:
        _refuse_code(directory, recipe, given)
    saved_conversion(directory)  # before the dense model is built
    dense, no_dense = _dense(recipe, given, allow_code)
    model = load(directory, base_model=dense, allow_code=allow_code)
    if dense is not None and any(acm.dense is None for acm in sites(model).values()):
        dense, no_dense = None, "its source now gives other weights than those that were converted"
    return SavedRun(
        directory=directory,
        model=model.to(place),
        recipe=recipe,
        given=given,
        dense=None if dense is None else dense.to(place),
        no_dense=no_dense,
    )


def saved_recipe(directory: Path) -> Recipe | None:
    """The recipe of the model saved in `directory`, None where it was saved without.

    UsageError without a folder, StorageError for one that holds neither a recipe nor a saved model.
    """
    refuse_missing(directory)
    file = directory / "recipe.yaml"
    if file.is_file():
        return load_recipe(file)
    saved_conversion(directory)
    return None


def _refuse_code(directory: Path, recipe: Recipe, given: Given) -> None:
    """A folder that someone else wrote must not make us import functions by naming them."""
    named = [recipe.task.kind] if recipe.task and given.task is None else []
    if recipe.data and given.data is None:
        named += [recipe.data.eval.kind, getattr(recipe.data.eval, "rows", "")]
    functions = [kind for kind in named if kind.startswith("python:")]
    if functions:
        raise UsageError(
            "the run's recipe names functions, which are not imported by themselves",
            where=str(directory / "recipe.yaml"),
            found=", ".join(functions),
            fix="if you trust the folder: --allow-code",
        )


def _dense(recipe: Recipe | None, given: Given, allow_code: bool) -> tuple[nn.Module | None, str]:
    """The model before conversion, with its weights; None and the reason where it is not to be had."""
    if given.base is not None:
        return build(given.base).model, ""
    if recipe is None:
        return None, "nothing names it; --base-model does"
    if recipe.model.source in ("python", "directory") and not allow_code:
        return None, "it is built by a function, which is imported only with --allow-code"
    try:
        return build(expand_paths(recipe).model, example=recipe.input, allow_code=allow_code).model, ""
    except AcmError as error:
        return None, error.what
