"""`acmc validate RECIPE`: check a recipe without its data or its model, and mostly without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from acm_compiler.cli.app import sentence
from acm_compiler.cli.output import JsonOption, Output, SetOption

if TYPE_CHECKING:
    from acm_compiler.recipe import Recipe


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("validate", help="Check a recipe, offline and in a second.")(validate)


def validate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")],
    overrides: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Say that the recipe holds, or everything that is wrong with it."""
    from acm_compiler.errors import RecipeError
    from acm_compiler.recipe import how_to_set, load_recipe, recipe_hash, unset_variables

    out = Output(json=json)
    try:
        loaded = load_recipe(recipe, overrides or ())
        unknown = _check_model(loaded)
    except RecipeError as error:
        out.document({"recipe": recipe, "valid": False, "problems": list(error.problems), "notes": []})
        out.error(sentence(error))
        raise typer.Exit(error.exit_code) from error
    notes = [*unknown, *_note_device(loaded), *(str(note) for note in unset_variables(loaded))]
    phases = ", ".join(phase.phase for phase in loaded.schedule) or "none"
    out.say(f"{loaded.name}: valid (model {loaded.model.source}:{loaded.model.name}; phases: {phases})")
    for note in [*notes, *([how_to_set(loaded)] if unset_variables(loaded) else [])]:
        out.note(note)
    facts = {"recipe": loaded.name, "valid": True, "hash": recipe_hash(loaded), "problems": [], "notes": notes}
    out.document(facts)


def _note_device(loaded: Recipe) -> list[str]:
    """A note where the run's device is not here: it may be on the machine that the recipe is meant for."""
    if loaded.run.device in ("auto", "cpu"):
        return []
    from acm_compiler.errors import UsageError
    from acm_compiler.training.machine import find_device

    place = loaded.origin.document.place_of_value(("run", "device"))
    try:
        find_device(loaded.run.device, where=f"{place}: run.device")
    except UsageError as error:
        return [str(error)]
    return []


def _check_model(loaded: Recipe) -> list[str]:
    """RecipeError where no registry has the model, looked up there only when a look at its files does not find it.

    Returns what cannot be told here, for a note.
    """
    from acm_compiler.errors import ModelSourceError, RecipeError
    from acm_compiler.recipe.registries import is_installed, is_known

    if is_known(loaded.model):
        return []
    place = loaded.origin.document.place_of_value(("model", "name"))
    if not is_installed(loaded.model):
        return [f"{place}: {loaded.model.source} is not installed here, so the model's name was not looked up"]
    from acm_compiler.sources.build import check_name

    try:
        check_name(loaded.model)
    except ModelSourceError as error:
        raise RecipeError([f"{place}: {str(error).partition(chr(10))[0]}"], fix=error.fix) from error
    return []
