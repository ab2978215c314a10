"""The border at which errors become a message on stderr and an exit code."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from acm_compiler.cli.output import Output, wants_json
from acm_compiler.errors import AcmError, RecipeError

_INTERRUPTED = 130


class ErrorBoundary(TyperGroup):
    """The command group around all verbs: a user's mistake ends in one message, never in a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except AcmError as error:
            _report(error, ctx)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            Output().error("interrupted")
            raise typer.Exit(_INTERRUPTED) from error


def sentence(error: AcmError) -> str:
    """The error as text, the number of a recipe's problems first when there are several."""
    if isinstance(error, RecipeError) and len(error.problems) > 1:
        return "\n".join([f"{len(error.problems)} problems", *error.problems])
    return str(error)


def _report(error: AcmError, ctx: typer.Context) -> None:
    Output().error(sentence(error))
    if wants_json(ctx):
        facts = {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
        Output(json=True).document({"error": facts})
