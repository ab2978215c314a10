"""The `Task` that a recipe or a call of `acm.evaluate` names, checked against the class of a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from acm_compiler.data.batch import Batch, Facts, as_batch
from acm_compiler.errors import DataError, UsageError, counted
from acm_compiler.recipe.load import task_section
from acm_compiler.recipe.tasks import (
    TEXTS,
    CausalLMTask,
    ClassifyTask,
    CtcTask,
    EmbedTask,
    MaskedLMTask,
    PythonTask,
    TaskConfig,
    fitting_classes,
    names_share,
    refuse_other_head,
)
from acm_compiler.sources.from_python import call_function
from acm_compiler.tasks.base import NEEDED, Task, UsersTask, as_task, missing_parts, one_per_example
from acm_compiler.tasks.classify import Classify
from acm_compiler.tasks.ctc import open_ctc
from acm_compiler.tasks.embed import Embed
from acm_compiler.tasks.language import CausalLM, open_masked_lm


def open_task(config: TaskConfig, dataset: Dataset[Any] | None = None, model: nn.Module | None = None) -> Task:
    """The task that `config` describes; `dataset` tells it the classes or letters, `model` how it makes frames.

    UsageError for a function that returns no task or a model that is for another one, DataError for data that the
    task cannot work on.
    """
    auto_class = _auto_class(config, dataset)
    if model is not None and not isinstance(config, PythonTask):
        refuse_other_head(config.kind, type(model).__name__, auto_class=auto_class)
        _refuse_foreign_tokens(dataset, model)
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


def _refuse_foreign_tokens(dataset: Any, model: Any) -> None:
    """DataError where the data set holds tokens that the model's vocabulary lacks."""
    largest = Facts.of(dataset).largest_token
    if largest is None or not hasattr(model, "get_input_embeddings"):
        return
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if size is not None and largest >= size:
        raise DataError(
            "the data's tokens must be in the model's vocabulary",
            where=type(model).__name__,
            found=f"token {largest}",
            expected=f"tokens below {size}",
            fix="give data the tokenizer that belongs to the model (data.train.tokenizer, data.eval.tokenizer)",
        )


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


Score = Callable[[Any, Batch], Tensor]
_KINDS = "classify, causal_lm, masked_lm, embed, ctc, python:package.module:function"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetric(Task):
    """The part of a `Task` that measuring needs: `function(output, batch)` gives one score per example, [B]."""

    function: Score
    metric: str = field()  # without it the property of `Task` would be the default
    lower_is_better: bool = False

    @property
    def is_share(self) -> bool:
        """True for the name of an accuracy or an error rate."""
        return names_share(self.metric)

    def score(self, output: Any, batch: Batch) -> Tensor:
        """The function's scores as fp32 [B]. UsageError where there is not one number per example."""
        found = one_per_example(
            self.function(output, _as_given(batch)),
            batch,
            "metric must return one score per example",
            where=self.metric,
            fix="leave the mean over examples to evaluate",
        )
        if bool(found.isnan().any()):
            raise UsageError(
                "metric must return a number for every example",
                where=self.metric,
                found=f"nan for {int(found.isnan().sum())} of {counted(len(found), 'example')}",
                fix="look for nan in the model's output, or give an example that has no score that of a miss",
            )
        return found.float()


def _as_given(batch: Batch) -> Batch:
    """The batch with its labels under the name that a loader of transformers gives them, too."""
    return {"labels": batch["label"], **batch} if "label" in batch else batch


def task_for(
    given: Task | str | Mapping[str, Any] | None,
    metric: Score | None,
    *,
    lower_is_better: bool = False,
    dataset: Any = None,
    model: nn.Module,
) -> Task:
    """The task that `given` is or names (as in a recipe), or one of `metric` alone. UsageError for both or neither."""
    if (given is None) == (metric is None):
        raise UsageError(
            "exactly one of task and metric must be given",
            found="neither" if given is None else "both",
            expected=f"task= one of {_KINDS}, or metric= a function of (output, batch)",
        )
    if metric is not None and not callable(metric):
        raise UsageError(
            "metric must be a function",
            found=repr(metric) if isinstance(metric, (str, int, float)) else type(metric).__name__,
            expected="one of (output, batch), which gives one score per example",
            fix="what has a name goes to task=" if isinstance(metric, str) else None,
        )
    if metric is not None:
        name = getattr(metric, "__name__", type(metric).__name__).strip("<>").replace("_", " ")
        return OwnMetric(
            function=metric, metric="metric" if name == "lambda" else name, lower_is_better=lower_is_better
        )
    if isinstance(given, (str, Mapping)):
        return open_task(task_section(given, where="task"), dataset, model)
    missing = missing_parts(given, NEEDED[:-1])
    if missing or isinstance(given, type):
        found = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise UsageError(
            "task must be a task or the name of one",
            found=f"{found} without {', '.join(missing)}" if missing else found,
            expected=_KINDS,
            fix="a function that scores outputs goes to metric=",
        )
    return as_task(given)


def batch_for(task: Task, given: Any) -> Batch:
    """The batch that a loader gave, for `task`: a user's own finds its data's names there, as it does in training."""
    return as_batch(given, rename=not isinstance(task, UsersTask))
