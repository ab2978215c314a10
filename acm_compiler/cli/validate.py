"""`acmc validate RECIPE`: check a recipe without its data, its model or torch."""

from __future__ import annotations

from typing import Annotated

import typer

from acm_compiler.cli.errors import sentence
from acm_compiler.cli.output import JsonOption, Output, SetOption


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
    except RecipeError as error:
        out.document({"recipe": recipe, "valid": False, "problems": list(error.problems), "notes": []})
        out.error(sentence(error))
        raise typer.Exit(error.exit_code) from error
    notes = [str(note) for note in unset_variables(loaded)]
    phases = ", ".join(phase.phase for phase in loaded.schedule) or "none"
    out.say(f"{loaded.name}: valid (model {loaded.model.source}:{loaded.model.name}; phases: {phases})")
    for note in [*notes, *([how_to_set(loaded)] if notes else [])]:
        out.note(note)
    facts = {"recipe": loaded.name, "valid": True, "hash": recipe_hash(loaded), "problems": [], "notes": notes}
    out.document(facts)
