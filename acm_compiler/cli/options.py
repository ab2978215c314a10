"""Options and arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WANTS_JSON = "acm_compiler.json"


def _remember(ctx: typer.Context, wanted: bool) -> bool:
    if wanted:
        ctx.meta[_WANTS_JSON] = True  # shared by all contexts of one call: errors are reported by the outermost
    return wanted


def wants_json(ctx: typer.Context) -> bool:
    """True if the verb was called with --json."""
    return bool(ctx.meta.get(_WANTS_JSON))


JsonOption = Annotated[
    bool,
    typer.Option("--json", callback=_remember, is_eager=True, help="Print one JSON document; all else goes to stderr."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a recipe, such as schedule[0].lr=1e-4; repeatable."),
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", metavar="R", help="A YAML file, or the name of a shipped recipe.")
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task", metavar="TASK", help="classify, causal_lm, python:module:function, {kind: …}; unset: the recipe's."
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Examples: python:module:function, or {kind: …} as in recipes; unset: its own.",
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base-model", metavar="MODEL", help="The model before conversion, such as python:module:function."),
]
CodeOption = Annotated[
    bool, typer.Option("--allow-code", help="Import functions that the folder names. Only for folders you trust.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="D", help="cpu, cuda, cuda:1; unset: the recipe's.")
]
DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that acmc rewrite or acm.save wrote.")]
