"""`acmc schema`: the JSON Schema of recipes."""

from __future__ import annotations

import typer

from acm_compiler.cli.output import JsonOption, Output


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("schema", help="Print the JSON Schema of recipes, for editors.")(schema)


def schema(json: JsonOption = False) -> None:
    """Print the schema; it is a JSON document with or without --json."""
    from acm_compiler.recipe.resolved import recipe_json_schema

    Output(json=True).document(recipe_json_schema())
