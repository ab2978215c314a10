"""A saved model's folder opened again, with the task and the data that its recipe or the command line names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acm_compiler.errors import AcmError, UsageError
from acm_compiler.runs.given import Given

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from acm_compiler.evaluation.results import Evaluation
    from acm_compiler.inputs import Inputs
    from acm_compiler.recipe import Recipe
    from acm_compiler.recipe.datasets import DataConfig
    from acm_compiler.recipe.tasks import TaskConfig
    from acm_compiler.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """What to call it: the recipe's name, else the folder's."""
        return self.recipe.name if self.recipe else self.directory.absolute().name

    @property
    def subject(self) -> str | None:
        """What an evaluation of this run is of; see `Evaluation.subject`."""
        from acm_compiler.runs.folder import subject_of

        task, data = _sections(self.recipe, self.given)
        return subject_of(self.directory, data, task)

    def has_measured(self, found: Evaluation) -> bool:
        """Whether an evaluation may be of this saved model, on this run's data where they are known."""
        ours, theirs = self.subject, found.subject
        return ours is None or theirs is None or theirs == ours or theirs.startswith(f"{ours}:")

    def task(self, data: Dataset[Any]) -> Task:
        """The task on its data. UsageError when neither recipe nor command line names one."""
        from acm_compiler.tasks import open_task

        config, _ = _sections(self.recipe, self.given)
        if config is None:
            raise self._misses("task")
        return open_task(config, data, self.model)

    def data(self) -> Dataset[Any]:
        """The examples to evaluate on. UsageError when nothing names them, DataError when they are not here."""
        from acm_compiler.data import open_dataset
        from acm_compiler.passes.rewrite.conversion import conversion
        from acm_compiler.recipe import expand_paths

        recipe = self.recipe and expand_paths(self.recipe)
        _, config = _sections(recipe, self.given)
        if config is None:
            raise self._misses("data")
        if recipe is not None:
            return open_dataset(config, image_size=recipe.image_size(config))
        size = conversion(self.model).plan.model.image_size
        return open_dataset(config) if size is None else open_dataset(config, image_size=size)

    def inputs(self, count: int) -> Inputs:
        """The model's inputs for the first `count` evaluation examples, in the model's precision and on its device.

        UsageError when the recipe names no task or data, or the data has fewer examples.
        """
        from acm_compiler.data import BatchStream, count_examples
        from acm_compiler.sources.examples import fit_to

        data = self.data()
        if (have := count_examples(data)) < count:
            raise UsageError("more examples than the data has", found=count, expected=f"at most {have}")
        batch = next(BatchStream(dataset=data, batch=count, drop_last=True).epoch())
        return fit_to(self.model, self.task(data).inputs(batch))

    def _misses(self, section: str) -> UsageError:
        return UsageError(
            f"nothing says which {section} to take",
            where=str(self.directory),
            found=f"a recipe without {section}" if self.recipe else "a model saved without a recipe",
            fix="give both: --data python:my_module:my_data --task classify; or from Python, with batches of your own, "
            "acm.evaluate(model, batches, task=…), acm.report and acm.explain",
        )


def open_saved_run(
    directory: Path, *, given: Given | None = None, allow_code: bool = False, device: str | None = None
) -> SavedRun:
    """The run in `directory`, on `device`, None for the recipe's. Nothing named in it is imported unless `allow_code`.

    UsageError for a device that is not here; see `acm.load` for other errors.
    """
    from acm_compiler.checkpoint import load
    from acm_compiler.training.machine import find_device

    asked = None if device is None else find_device(device, where="--device")
    recipe, given = _recipe(directory), given or Given()
    place = asked or find_device(recipe.run.device if recipe else "auto")
    if recipe is not None and not allow_code:
        _refuse_code(directory, recipe, given)
    dense, no_dense = _dense(recipe, given, allow_code)
    model = load(directory, base_model=dense, allow_code=allow_code)
    if dense is not None and not _kept_dense(model):
        dense, no_dense = None, "its source now gives other weights than those that were converted"
    return SavedRun(
        directory=directory,
        model=model.to(place),
        recipe=recipe,
        given=given,
        dense=None if dense is None else dense.to(place),
        no_dense=no_dense,
    )


def read_budgets(directory: Path, text: str) -> list[float]:
    """The `checked_budgets` as shares of learner MACs."""
    from acm_compiler.checkpoint import saved_conversion
    from acm_compiler.runtime.budgets import parse_budget

    asked = checked_budgets(directory, text)
    plan = saved_conversion(directory).plan
    return [parse_budget(budget, plan) for budget in asked]


def checked_budgets(directory: Path, text: str) -> list[float | str]:
    """The budgets in `text`, by commas and as `acm.set_budget` takes them.

    UsageError and BudgetUnreachable for those that the model saved in `directory` cannot be set to; it is not loaded.
    """
    from acm_compiler.checkpoint import saved_conversion
    from acm_compiler.runtime.budgets import setting_of

    asked = parse_budgets(text)
    _check_folder(directory)
    owner = saved_conversion(directory)
    for budget in asked:
        setting_of(owner, budget)
    return asked


def parse_budgets(text: str) -> list[float | str]:
    """Budgets by commas: shares, or texts as `acm.set_budget` takes them."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("no budgets given", where="--budgets", found=repr(text), expected="such as .25,60%,11GMACs")
    return [_number(part) for part in parts]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _check_folder(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError("no such folder", where=str(directory), fix="name the folder that acmc rewrite wrote")


def _recipe(directory: Path) -> Recipe | None:
    from acm_compiler.recipe import load_recipe

    _check_folder(directory)
    file = directory / "recipe.yaml"
    return load_recipe(file) if file.is_file() else None


def _sections(recipe: Recipe | None, given: Given) -> tuple[TaskConfig | None, DataConfig | None]:
    """The task, and the data to evaluate on: given, else the recipe's."""
    data = recipe.data.eval if recipe is not None and recipe.data is not None else None
    return given.task or (recipe.task if recipe else None), given.data or data


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
    from acm_compiler.recipe import expand_paths
    from acm_compiler.sources import build

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


def _kept_dense(model: nn.Module) -> bool:
    """Whether loading found the dense model to be the one that was converted."""
    from acm_compiler.passes.rewrite.conversion import sites

    return all(acm.dense is not None for acm in sites(model).values())
