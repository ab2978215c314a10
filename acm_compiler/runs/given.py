"""What the command line names in place of a folder's recipe: the task, the data, the model before conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from acm_compiler.recipe.datasets import DataConfig
    from acm_compiler.recipe.models import ModelConfig
    from acm_compiler.recipe.tasks import TaskConfig

TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task", metavar="TASK", help="classify, causal_lm, python:module:function, {kind: …}; unset: the recipe's."
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Examples: python:module:function, or {kind: …} as in recipes; unset: its own.",
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base-model", metavar="MODEL", help="The model before conversion, such as python:module:function."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The task, the data and the base model that were named, None where nothing was."""

    task: TaskConfig | None = None
    data: DataConfig | None = None
    base: ModelConfig | None = None

    @staticmethod
    def read(task: str | None, data: str | None, base_model: str | None) -> Given:
        """The values of --task, --data and --base-model. UsageError for what cannot be meant."""
        from acm_compiler.recipe.sections import data_section, read_section, task_section
        from acm_compiler.sources import parse_reference

        return Given(
            task=None if task is None else task_section(read_section(task, where="--task"), where="--task"),
            data=None if data is None else data_section(read_section(data, where="--data"), where="--data"),
            base=None if base_model is None else parse_reference(base_model),
        )
