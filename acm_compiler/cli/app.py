"""The command `acmc`: its verbs, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Annotated

import typer

from acm_compiler.cli.errors import ErrorBoundary
from acm_compiler.cli.output import ending_unwritable, say_warnings

# in the order of --help; each module's `register(app)` adds its verb, and imports what is heavy inside it
VERBS = ("plan", "rewrite", "eval", "bench", "report", "explain", "kernels", "recipes", "validate", "schema", "doctor")

app = typer.Typer(
    name="acmc",
    cls=ErrorBoundary,
    help="Turn a trained transformer into one that serves every compute budget.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import acm_compiler

        typer.echo(f"acm_compiler {acm_compiler.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Turn a trained transformer into one that serves every compute budget."""


for _verb in VERBS:
    importlib.import_module(f"acm_compiler.cli.{_verb}").register(app)


def main() -> None:
    """Run `acmc` with the arguments of this process; `python:` names are also looked for where the user stands."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what ends a job ends it as Ctrl-C does
    sys.path.append(os.getcwd())
    say_warnings()
    with ending_unwritable():
        app(prog_name="acmc")
