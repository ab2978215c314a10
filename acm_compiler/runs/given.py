"""Values of options in place of what a folder's recipe says: task, data, base model, budgets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from acm_compiler.errors import UsageError

if TYPE_CHECKING:
    from acm_compiler.recipe import Recipe
    from acm_compiler.recipe.datasets import DataConfig
    from acm_compiler.recipe.models import ModelConfig
    from acm_compiler.recipe.tasks import TaskConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The task, the data and the base model that were named, None where nothing was."""

    task: TaskConfig | None = None
    data: DataConfig | None = None
    base: ModelConfig | None = None

    def over(self, recipe: Recipe | None) -> Given:
        """The same with the recipe's task, and the data it is evaluated on, where none were named."""
        if recipe is None:
            return self
        data = recipe.data.eval if recipe.data else None
        return replace(self, task=self.task or recipe.task, data=self.data or data)

    @staticmethod
    def read(task: str | None, data: str | None, base_model: str | None) -> Given:
        """The values of --task, --data and --base-model. UsageError for what cannot be meant."""
        from acm_compiler.recipe.load import data_section, read_section, task_section
        from acm_compiler.sources.build import parse_reference

        return Given(
            task=None if task is None else task_section(read_section(task, where="--task"), where="--task"),
            data=None if data is None else data_section(read_section(data, where="--data"), where="--data"),
            base=None if base_model is None else parse_reference(base_model),
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
    refuse_missing(directory)
    owner = saved_conversion(directory)
    for budget in asked:
        setting_of(owner, budget)
    return asked


def parse_budgets(text: str, option: str = "--budgets") -> list[float | str]:
    """Budgets by commas: shares, or texts as `acm.set_budget` takes them."""
    if not (parts := by_commas(text)):
        raise UsageError("no budgets given", where=option, found=repr(text), expected="such as .25,60%,11GMACs")
    return [number_or_text(part) for part in parts]


def by_commas(text: str) -> list[str]:
    """The parts of a text between commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def number_or_text(text: str) -> float | str:
    """The number that a text is, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def refuse_missing(directory: Path) -> None:
    """UsageError where there is no such folder."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else None
        raise UsageError(
            "no such folder", where=str(directory), found=found, fix="name the folder that acmc rewrite wrote"
        )
