"""`acmc recipes`: list, show and copy the recipes that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acm_compiler.cli.output import JsonOption, Output

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a shipped recipe.")]
recipes_app = typer.Typer(name="recipes", help="Shipped recipes: ls, show, copy.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the verb and its three parts."""
    app.add_typer(recipes_app)


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
        raise UsageError("there is a file already", where=str(path), fix="give another name, or --force")
    write_file(path, source.read_bytes())
    out.say(f"wrote {path}")
    out.document({"name": name, "path": str(path)})
