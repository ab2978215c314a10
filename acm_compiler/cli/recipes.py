"""`acmc recipes`, `validate` and `schema`: recipes listed, shown, copied and checked, mostly without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acm_compiler.cli.options import JsonOption, SetOption
from acm_compiler.cli.output import Output, error_facts, sentence

if TYPE_CHECKING:
    from acm_compiler.recipe import Recipe

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a shipped recipe.")]
recipes_app = typer.Typer(rich_markup_mode=None)


@recipes_app.callback(invoke_without_command=True)
def _list_by_default(ctx: typer.Context, json: JsonOption = False) -> None:
    if ctx.invoked_subcommand is None:
        list_recipes(json=json)


@recipes_app.command("ls", help="List the shipped recipes.")
def list_recipes(json: JsonOption = False) -> None:
    """One line per recipe: its name and what it is."""
    from acm_compiler.recipe import load_recipe, shipped_recipes

    out = Output(json=json)
    recipes = [load_recipe(name) for name in shipped_recipes()]
    out.table([(recipe.name, recipe.description) for recipe in recipes])
    if not json:
        out.note("acmc rewrite --recipe NAME runs one; acmc compare --recipe NAME measures other methods beside it")
    out.document({"recipes": [{"name": recipe.name, "description": recipe.description} for recipe in recipes]})


@recipes_app.command("show", help="Print a shipped recipe.")
def show(name: Name, json: JsonOption = False) -> None:
    """The recipe's file as it is; with --json also complete, with every default."""
    from acm_compiler.recipe import load_recipe, shipped_recipe

    out = Output(json=json)
    text = shipped_recipe(name).read_text(encoding="utf-8")
    out.say(text.rstrip("\n"))
    complete = load_recipe(name).model_dump(mode="json", exclude={"resolved"})
    out.document({"name": name, "text": text, "recipe": complete})


@recipes_app.command("copy", help="Copy a shipped recipe, to change it.")
def copy(
    name: Name,
    target: Annotated[Path | None, typer.Argument(help="A file or folder; without it NAME.yaml here.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Copy the recipe's file; an existing one stays unless --force is given."""
    from acm_compiler.errors import UsageError
    from acm_compiler.files import write_file
    from acm_compiler.recipe import shipped_recipe

    out = Output(json=json)
    source = shipped_recipe(name)
    path = target or Path(source.name)
    path = path / source.name if path.is_dir() else path
    if path.exists() and not force:
        raise UsageError("the file exists already", where=str(path), fix="give another name, or --force")
    write_file(path, source.read_bytes())
    out.say(f"wrote {path}")
    out.document({"name": name, "path": str(path)})


def validate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")],
    overrides: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Report that the recipe is valid, or every fault in it."""
    from acm_compiler.errors import RecipeError
    from acm_compiler.recipe import how_to_set, load_recipe, recipe_hash, unset_variables

    out = Output(json=json)
    try:
        loaded = load_recipe(recipe, overrides or ())
        _check_functions(loaded)
        unknown = [*_check_model(loaded), *_check_tokenizers(loaded)]
    except RecipeError as error:
        found = {"valid": False, "problems": list(error.problems), "notes": [], "error": error_facts(error)}
        out.document({"recipe": recipe, **found})
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

    try:
        find_device(loaded.run.device, where=f"{loaded.place('run', 'device')}: run.device")
    except UsageError as error:
        return [str(error)]
    return []


def _check_model(loaded: Recipe) -> list[str]:
    """RecipeError where no registry or folder has the model, looked up only when a look at files does not find it.

    Returns what cannot be told here, for a note.
    """
    from acm_compiler.errors import RecipeError, UsageError
    from acm_compiler.recipe.load import expand, unset_in
    from acm_compiler.recipe.lookup import is_installed, is_known

    model = loaded.model if unset_in(loaded.model) else expand(loaded.model)
    if is_known(model):
        return []
    key, needed = ("gguf", f"{model.name} or the package gguf") if model.gguf else ("name", model.source)
    place = loaded.place("model", key)
    if not is_installed(model):
        return [f"{place}: {needed} is not installed here, so the model's {key} was not looked up"]
    from acm_compiler.sources.build import check_name

    try:
        check_name(model)
    except UsageError as error:
        raise RecipeError([f"{place}: {str(error).partition(chr(10))[0]}"], fix=error.fix) from error
    return []


def _check_functions(loaded: Recipe) -> None:
    """RecipeError for functions that are not there: modules are imported only where a look at files finds none."""
    from acm_compiler.errors import AcmError, RecipeError
    from acm_compiler.recipe.load import named_functions
    from acm_compiler.recipe.lookup import is_defined

    problems, fix = [], None
    for path, name in named_functions(loaded):
        if is_defined(name):
            continue
        from acm_compiler.sources.from_python import find_function

        try:
            find_function(name)
        except AcmError as error:
            problems.append(f"{loaded.place(*path)}: {str(error).partition(chr(10))[0]}")
            fix = fix or error.fix
    if problems:
        raise RecipeError(problems, fix=fix)


def _check_tokenizers(loaded: Recipe) -> list[str]:
    """RecipeError where the folder or package of a tokenizer is here, and lacks its file; a note for each that is not.

    Tokenizers in paths with variables that are not set are left alone.
    """
    from acm_compiler.errors import AcmError, RecipeError
    from acm_compiler.recipe.datasets import TextData, TextRowsData
    from acm_compiler.recipe.load import expand, unset_in
    from acm_compiler.recipe.lookup import place_is_here, tokenizer_file

    notes = []
    for part in ("train", "eval"):
        section = getattr(loaded.data, part, None)
        if not isinstance(section, (TextData, TextRowsData)) or unset_in(section):
            continue
        tokenizer = expand(section).tokenizer
        place = loaded.place("data", part, "tokenizer")
        if not place_is_here(tokenizer):
            notes.append(f"{place}: the place of {tokenizer} is not here, so the tokenizer was not looked up")
            continue
        try:
            tokenizer_file(tokenizer)
        except AcmError as error:
            raise RecipeError([f"{place}: {str(error).partition(chr(10))[0]}"], fix=error.fix) from error
    return notes


def schema(json: JsonOption = False) -> None:
    """Print the schema; it is a JSON document with or without --json."""
    from acm_compiler.recipe.resolved import recipe_json_schema

    Output(json=True).document(recipe_json_schema())
