"""`acmc rewrite --recipe R`: the main job, from a trained model to a saved model with budgets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acm_compiler.cli.options import JsonOption, RecipeOption, SetOption
from acm_compiler.cli.output import Output

if TYPE_CHECKING:
    from acm_compiler.recipe import Recipe
    from acm_compiler.runs.folder import RunOptions

ForceOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace what an earlier run left in the folder; with --resume, only what is finished."
    ),
]


def rewrite(
    recipe: RecipeOption,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the result goes; unset: runs/NAME.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Stop before the first phase, with all checks made.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an unfinished run in the folder; leave a finished one.")
    ] = False,
    force: ForceOption = False,
    until: Annotated[str | None, typer.Option(metavar="PHASE", help="Stop after this phase.")] = None,
    strict_budget: Annotated[
        bool, typer.Option("--strict-budget", help="Exit 4 when a budget is missed by more than .01.")
    ] = False,
    overrides: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Carry out a recipe."""
    from acm_compiler.recipe import load_recipe
    from acm_compiler.runs.folder import RunOptions

    loaded = load_recipe(recipe, overrides or ())
    output, directory = Output(json=json), out or Path("runs") / loaded.name
    options = RunOptions(
        directory=directory,
        resume=resume,
        force=force,
        until=until,
        strict_budget=strict_budget,
        resume_command=resume_command(recipe, directory, overrides or [], force=force),
    )
    if dry_run:
        _dry_run(loaded, options, output)
        return
    from acm_compiler.cli.eval import say_advice
    from acm_compiler.evaluation.wording import evaluation_table
    from acm_compiler.runs.run_recipe import run_recipe

    output.progress(f"{loaded.name}: the result goes to {directory}")
    evaluation = run_recipe(loaded, options, say=output.progress)
    if evaluation is not None:
        output.say(evaluation_table(evaluation))
        say_advice(directory, evaluation, loaded, output)
    output.document((evaluation.as_json() if evaluation is not None else {}) | {"directory": str(directory)})
    output.say(f"saved in {directory}")


def _dry_run(recipe: Recipe, options: RunOptions, output: Output) -> None:
    """The run up to its first phase; with variables unset, only what the plan and the folder can tell."""
    from acm_compiler.passes.rewrite.conversion import conversion
    from acm_compiler.planning.check_schedule import check_phase
    from acm_compiler.recipe import expand_paths, how_to_set, unset_variables
    from acm_compiler.runs.folder import check_run_folder
    from acm_compiler.runs.pipeline import check_recipe, plan_recipe
    from acm_compiler.runs.run_recipe import RecipeRun
    from acm_compiler.training.machine import open_machine

    check_phase(options.until, recipe.schedule)
    machine = open_machine(recipe.run.precision, recipe.run.device, sharded=recipe.run.sharded)
    if unset := unset_variables(recipe):
        built, made, _ = plan_recipe(recipe)
        output.say(str(made))
        check_recipe(recipe, built.model, made)
    else:
        recipe = expand_paths(recipe)
        _, model = RecipeRun(recipe, machine, output.progress).prepare(options, report=output.say)
        made = conversion(model).plan
    check_run_folder(recipe, options)
    for note in [*map(str, unset), *([how_to_set(recipe)] if unset else [])]:
        output.note(note)
    output.say(f"dry run: {'the plan was' if unset else 'model, data, plan and folder were'} checked, nothing written")
    output.document({"plan": made.as_json()})


def resume_command(recipe: str, directory: Path, overrides: list[str], *, force: bool) -> str:
    """The words that continue this run, on as many processes; "…" for options of a launcher that it does not know."""
    import shlex

    changes = [part for override in overrides for part in ("--set", override)]
    # a run that has saved no state yet still has the earlier result in its folder
    again = ["--resume", "--force"] if force else ["--resume"]
    words = ["rewrite", "--recipe", recipe, "--out", str(directory), *changes, *again]
    return f"{_launched()} {shlex.join(words)}"


def _launched() -> str:
    """The words that started this process and those beside it, up to the verb."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return "acmc"
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        return "accelerate launch … -m acm_compiler"
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        return f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']} -m acm_compiler"
    return "torchrun … -m acm_compiler"
