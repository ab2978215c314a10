"""`acmc explain DIR`: what the backend makes of every ACM of a saved model."""

from __future__ import annotations

from typing import Annotated

import typer

from acm_compiler.cli.options import BaseOption, CodeOption, DataOption, DirArgument, JsonOption, TaskOption
from acm_compiler.cli.output import Output
from acm_compiler.runs.given import Given

BatchOption = Annotated[int, typer.Option("--batch", min=1, metavar="B", help="Examples in the traced call.")]


def explain(
    directory: DirArgument,
    batch: BatchOption = 2,
    task: TaskOption = None,
    data: DataOption = None,
    base_model: BaseOption = None,
    allow_code: CodeOption = False,
    json: JsonOption = False,
) -> None:
    """Trace the model's call and print one row per site."""
    from acm_compiler.backend.explanation import explain
    from acm_compiler.runs.recipe_run import open_saved_run
    from acm_compiler.sources.inputs import split_inputs

    output = Output(json=json)
    run = open_saved_run(directory, given=Given.read(task, data, base_model), allow_code=allow_code)
    args, kwargs = split_inputs(run.inputs(batch))
    found = explain(run.model.eval(), *args, **kwargs)
    output.say(str(found))
    output.document({key: value for key, value in found.as_json().items() if key != "schema"})
