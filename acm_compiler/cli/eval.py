"""`acmc eval DIR`: metric and cost of a saved model, at several budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acm_compiler.cli.options import BaseOption, CodeOption, DataOption, DirArgument, JsonOption, TaskOption
from acm_compiler.cli.output import Output
from acm_compiler.runs.given import Given, checked_budgets

if TYPE_CHECKING:
    from acm_compiler.evaluation.evaluate import Setting
    from acm_compiler.evaluation.results import Evaluation
    from acm_compiler.recipe import Recipe
    from acm_compiler.runs.opened import SavedRun


def evaluate(
    directory: DirArgument,
    budgets: Annotated[
        str | None,
        typer.Option(metavar="B,B,…", help="Shares of learner MACs, or 60%, or 11GMACs; unset: the recipe's."),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measure on N examples only, drawn at random.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="B", help="Examples per forward; unset: the recipe's eval_batch.")
    ] = None,
    per_site: Annotated[
        bool, typer.Option("--per-site", help="Also show what each k is expected to do at every site.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result here as JSON, and keep none in DIR.")
    ] = None,
    task: TaskOption = None,
    data: DataOption = None,
    base_model: BaseOption = None,
    allow_code: CodeOption = False,
    json: JsonOption = False,
) -> None:
    """Print the metric and the cost at each budget, and keep them in the folder."""
    from acm_compiler.calibration.recalibrate import known_damages
    from acm_compiler.evaluation.wording import evaluation_table
    from acm_compiler.runs.opened import open_saved_run

    output = Output(json=json)
    given = Given.read(task, data, base_model)
    _check_place(out)
    asked = None if budgets is None else checked_budgets(directory, budgets)
    run = open_saved_run(directory, given=given, allow_code=allow_code)
    found = measure(run, output, budgets=asked, examples=examples, batch=batch)
    keep(run, found, output, out)
    output.say(evaluation_table(found))
    say_advice(directory, found, run.recipe, output)
    damages = known_damages(run.model) if per_site else None
    if damages is not None:
        output.say("\n" + damage_table(damages))
    output.document(found.as_json() | ({} if damages is None else {"sensitivity": damages}))


def _check_place(out: Path | None) -> None:
    """UsageError where no file can be at `out`, before anything is measured."""
    from acm_compiler.errors import UsageError

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        found = "a folder" if out.is_dir() else f"no folder {out.parent}"
        expected = "a file in a folder that exists"
        raise UsageError("the result cannot be written there", where="--out", found=found, expected=expected)


def say_advice(directory: Path, found: Evaluation, recipe: Recipe | None, output: Output) -> None:
    """Advise how to make the saved model as good as the dense one, where it should be and is not."""
    from acm_compiler.checkpoint import saved_conversion
    from acm_compiler.evaluation.advice import advise_lossless

    advice = advise_lossless(found, saved_conversion(directory).plan, recipe.schedule if recipe else ())
    if advice is not None:
        output.say(f"advice: {advice}")


def damage_table(damages: dict[str, dict[int, float]]) -> str:
    """The table of expected damages, or why there is none."""
    from acm_compiler.calibration.recalibrate import Sensitivity

    if not damages:
        return "no expected damages: they come from a calibrate phase"
    return (
        f"{Sensitivity(sites=damages)}\nexpected damage: the squared change of the model's output over its squared "
        "norm, to first order, if every token ran k learners at that site alone"
    )


def measure(
    run: SavedRun,
    output: Output,
    *,
    budgets: Sequence[Setting] | None = None,
    examples: int | None = None,
    batch: int | None = None,
) -> Evaluation:
    """The evaluation of a saved run, at every fixed k, too; `budgets` None: those of its recipe that it can reach.

    `batch`: examples per forward; None: the recipe's.
    """
    found = run.opened.measure(
        run.model,
        run.dense,
        run.task,
        say=output.progress,
        note=output.note,
        budgets=budgets,
        examples=examples,
        batch=batch,
    )
    found = dataclasses.replace(found, subject=run.subject)
    return found if run.dense is not None else _with_recorded(found, run, output)


def keep(run: SavedRun, found: Evaluation, output: Output, out: Path | None = None) -> None:
    """Write `eval.json`, or what holds evaluations on other data than the run's own: with the budgets that it has
    already, if they were measured on the same examples, and not at all if those were more. A folder that cannot be
    written to is no failure, since the result is printed. out: a file to write the result alone to, in place of it."""
    from acm_compiler.errors import StorageError, counted
    from acm_compiler.evaluation.results import FILE, joined, load_evaluation, save_evaluation
    from acm_compiler.files import write_file

    if out is not None:
        write_file(out, found.to_json() + "\n")
        return
    try:
        file = run.directory / run.evaluation_file
        before = load_evaluation(run.directory, file.name)
        whole = found if before is None else joined(before, found)
        if before is not None and whole is None and before.subject in (None, found.subject) and before.n > found.n:
            output.note(f"{file} stays as it was: it was measured on {counted(before.n, 'example')}")
            return
        save_evaluation(run.directory, whole or found, file.name)
    except StorageError as error:
        output.warn(str(error))
        return
    if before is not None and whole is None:
        shown = f"budgets {_listed(before)} on {counted(before.n, 'example')}"
        output.note(f"{file} held {shown}, on other examples or not of this model: it is replaced")
    elif whole is not None and len(whole.budgets) > len(found.budgets):
        output.note(f"{file} keeps what was measured before beside this: budgets {_listed(whole)}")
    elif file.name != FILE:
        output.note(f"kept in {file}, as it is on other data than {FILE}, or for another task; that file stays")


def _listed(evaluation: Evaluation) -> str:
    return ", ".join(f"{row.asked:.4g}" for row in evaluation.budgets)


def _with_recorded(found: Evaluation, run: SavedRun, output: Output) -> Evaluation:
    """The dense metric of an earlier evaluation, where today the dense model is not to be had."""
    from acm_compiler.evaluation.results import load_evaluation

    output.note(f"the dense model is not compared: {run.no_dense}")
    before = load_evaluation(run.directory, run.evaluation_file)
    if found.metric.dense is not None or before is None or before.metric.dense is None:
        return found
    if before.subject not in (None, found.subject):
        return found
    metric = dataclasses.replace(
        found.metric, dense=before.metric.dense, dense_error=before.metric.dense_error, dense_from="recorded"
    )
    return dataclasses.replace(found, metric=metric)
