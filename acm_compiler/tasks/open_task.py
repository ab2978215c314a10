"""The `Task` that a recipe names, checked against the class of a transformers model."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from acm_compiler.data.facts import Facts
from acm_compiler.errors import UsageError
from acm_compiler.recipe.compatibility import TEXTS, fitting_classes
from acm_compiler.recipe.tasks import (
    CausalLMTask,
    ClassifyTask,
    CtcTask,
    EmbedTask,
    MaskedLMTask,
    PythonTask,
    TaskConfig,
)
from acm_compiler.sources.python_function import call_function
from acm_compiler.tasks.base import Task
from acm_compiler.tasks.classify import Classify
from acm_compiler.tasks.ctc import open_ctc
from acm_compiler.tasks.embed import Embed
from acm_compiler.tasks.language import CausalLM, open_masked_lm
from acm_compiler.tasks.users_task import NEEDED, as_task, missing_parts


def open_task(config: TaskConfig, dataset: Dataset[Any] | None = None, model: nn.Module | None = None) -> Task:
    """The task that `config` describes; `dataset` tells it the classes or letters, `model` how it makes frames.

    UsageError for a function that returns no task or a model that is for another one, DataError for data that the
    task cannot work on.
    """
    auto_class = _auto_class(config, dataset)
    if model is not None and not isinstance(config, PythonTask):
        refuse_other_head(config.kind, model, auto_class=auto_class)
    if isinstance(config, ClassifyTask):
        classes = Facts.of(dataset).classes
        count = len(classes) if classes else None
        name = "the data set" if dataset is None else type(dataset).__name__
        return Classify(label_smoothing=config.label_smoothing, classes=count, auto_class=auto_class, data=name)
    if isinstance(config, CausalLMTask):
        return CausalLM()
    if isinstance(config, MaskedLMTask):
        return open_masked_lm(config, dataset)
    if isinstance(config, EmbedTask):
        return Embed()
    if isinstance(config, CtcTask):
        return open_ctc(dataset, model, unit=config.unit)
    assert isinstance(config, PythonTask)
    return _users(config.kind, config.args)


def _auto_class(config: TaskConfig, dataset: Any) -> str:
    """The transformers class that builds a model for this task on this data."""
    if isinstance(config, ClassifyTask) and Facts.of(dataset).pieces is not None:
        return TEXTS
    return " or ".join(fitting_classes(config.kind))


def _users(reference: str, arguments: dict[str, Any]) -> Task:
    task = call_function(reference, arguments)
    missing = missing_parts(task, (*NEEDED, "loss"))
    if missing:
        raise UsageError(
            "the function did not return a task",
            where=reference,
            found=f"{type(task).__name__} without {', '.join(missing)}",
            fix="see acm_compiler/tasks/base.py for what a task has",
        )
    return as_task(task, reference)


# XLM's and Flaubert's …WithLMHeadModel may be either
_HEADS = {
    r"ForCausalLM|(?<!With)LMHeadModel": ("causal_lm", "writes the next token, and sees only what came before"),
    r"ForMaskedLM": ("masked_lm", "guesses hidden tokens, and sees what comes after them"),
    r"ForCTC": ("ctc", "writes down audio"),
    r"For(Sequence|Image|Audio|Video)Classification": ("classify", "answers one class per example"),
}


def refuse_other_head(task: str, model: nn.Module, *, auto_class: str) -> None:
    """Refuse a model whose class says that it is for another task; `auto_class`: the one that fits. UsageError."""
    name = type(model).__name__
    for pattern, (fits, what) in _HEADS.items():
        if re.search(rf"({pattern})$", name) and task != fits:
            raise UsageError(
                f"the model is not for task {task}",
                where=name,
                found=f"a model that {what}: task {fits}",
                fix=f"use task {fits}, or another model (for hf: auto_class {auto_class})",
            )
