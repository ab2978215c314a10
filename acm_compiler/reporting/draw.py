"""`acm.report`: an evaluation as charts and one HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.calibration.recalibrate import known_damages
from acm_compiler.data import Batch, as_batch
from acm_compiler.errors import UsageError
from acm_compiler.evaluation.find_loads import Loads, find_loads
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.files import folder_at
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.reporting.contents import Report
from acm_compiler.reporting.write import write_report
from acm_compiler.tasks import Task, task_for

_NO_EXAMPLES = "acm.report was given no examples"


def report(
    model: nn.Module,
    evaluation: Evaluation,
    directory: str | os.PathLike[str],
    *,
    examples: Any = None,
    task: Task | str | Mapping[str, Any] | None = None,
    title: str | None = None,
    description: str = "",
) -> Path:
    """Write `index.html`, one page that holds all it needs, and its charts (PNG and SVG) into `directory`.

    evaluation: what `acm.evaluate` found for this model.
    examples: a batch as `acm.evaluate` takes them, to show where the learners run: maps for pictures, and loads along
    clips or texts. task: what says how the model is called with them, as for `acm.evaluate`; None: by names.
    title: None for the name of the model's class.
    Returns the page's path. Raises PackageMissing without matplotlib, StorageError where nothing can be written.
    """
    owner = conversion(model)
    if not isinstance(evaluation, Evaluation):
        raise UsageError(
            "evaluation must be what acm.evaluate returned",
            found=f"the class {evaluation.__name__}" if isinstance(evaluation, type) else type(evaluation).__name__,
            expected="an Evaluation",
            fix="evaluation = acm.evaluate(model, batches, task=…)",
        )
    loads = Loads(missing=_NO_EXAMPLES)
    if examples is not None:
        judge = task_for(task, None if task is not None else _unscored, model=model)
        loads = find_loads(model, evaluation, lambda: as_batch(examples), judge)
    return write_report(
        folder_at(directory),
        Report(
            title=title or owner.plan.model.cls.rpartition(".")[2],
            description=description,
            evaluation=evaluation,
            plan=owner.plan,
            damages=known_damages(model),
            loads=loads,
        ),
    )


def _unscored(output: Any, batch: Batch) -> Tensor:
    return torch.zeros(len(next(iter(batch.values()))))
