"""The command `acmc`: its verbs, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from acm_compiler.cli.bench import bench
from acm_compiler.cli.compare import compare
from acm_compiler.cli.doctor import doctor
from acm_compiler.cli.eval import evaluate
from acm_compiler.cli.export import export
from acm_compiler.cli.kernels import explain, kernels
from acm_compiler.cli.options import wants_json
from acm_compiler.cli.output import Output, ending_unwritable, error_facts, is_first_of_machine, say_warnings, sentence
from acm_compiler.cli.plan import plan
from acm_compiler.cli.recipes import recipes_app, schema, validate
from acm_compiler.cli.report import report
from acm_compiler.cli.rewrite import rewrite
from acm_compiler.cli.serve import serve
from acm_compiler.errors import AcmError, RecipeError, RunInterrupted, StorageError, UsageError

_INTERRUPTED = 130
# typer's own error for a command line that cannot be meant; only this subclass of it has a public name
_Misuse: Any = typer.BadParameter.__base__
# what verbs call an argument that names a recipe
_RECIPES = {"WHAT", "RECIPE"}
# what all processes of a launch raise that run on one machine: they were given the same words, and stop together
_RAISED_BY_ALL = (UsageError, RecipeError, StorageError, RunInterrupted)


class ErrorBoundary(TyperGroup):
    """The command group around all verbs: a user's mistake ends in one message, never in a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except _Misuse as error:
            _reword(error)
            if json:
                Output(json=True).document({"error": error_facts(UsageError(error.format_message()))})
            raise
        except AcmError as error:
            _report(error, ctx)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            Output().error("interrupted")
            if wants_json(ctx):
                Output(json=True).document({"error": error_facts(RunInterrupted("interrupted"))})
            raise typer.Exit(_INTERRUPTED) from error


def _report(error: AcmError, ctx: typer.Context) -> None:
    if isinstance(error, _RAISED_BY_ALL) and not is_first_of_machine():
        return
    Output().error(sentence(error))
    if wants_json(ctx):
        Output(json=True).document({"error": error_facts(error)})


def _reword(misuse: Any) -> None:
    """Put a value that an option cannot have into our words, as typer words it as pydantic does; hint at arguments."""
    if getattr(misuse, "option_name", None) == "--recipe":
        for name in {parameter.metavar for parameter in misuse.ctx.command.params} & _RECIPES:
            misuse.message += f"; the recipe is an argument here: {misuse.ctx.command_path} {name}"
    cause = misuse.__cause__
    if cause is None or type(cause).__module__.partition(".")[0] != "pydantic_core":
        return
    from acm_compiler.recipe.messages import wrong_values

    misuse.message = "; ".join(wrong_values(cause))


# in the order of --help; what is heavy is imported inside each function
VERBS: dict[str, tuple[Callable[..., None] | typer.Typer, str]] = {
    "plan": (plan, "Find a model's sites and print what converting them costs."),
    "rewrite": (rewrite, "Convert a model by a recipe: plan, rewrite, train, evaluate, save."),
    "eval": (evaluate, "Measure a saved model at several budgets."),
    "bench": (bench, "Measure a saved model's time against the dense model's."),
    "compare": (compare, "Measure other methods beside ours, on a recipe's model and data."),
    "report": (report, "Write charts and an HTML page about a saved model."),
    "explain": (explain, "Show what runs each ACM of a saved model when it is compiled, and why."),
    "export": (export, "Export a saved model as a program whose budget is an input."),
    "serve": (serve, "Serve a saved model over HTTP, at budgets that follow the load."),
    "kernels": (kernels, "List GPU kernels: tiles, where they come from, registers, spills."),
    "recipes": (recipes_app, "Shipped recipes: ls, show, copy."),
    "validate": (validate, "Check a recipe, offline and in a second."),
    "schema": (schema, "Print the JSON Schema of recipes, for editors."),
    "doctor": (doctor, "Show versions, devices, backend, compiler, recipes."),
}

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


for _name, (_verb, _help) in VERBS.items():
    if isinstance(_verb, typer.Typer):
        app.add_typer(_verb, name=_name, help=_help)
    else:
        app.command(_name, help=_help)(_verb)


def main() -> None:
    """Run `acmc` with the arguments of this process; `python:` names are also looked for where the user stands."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what ends a job ends it as Ctrl-C does
    sys.path.append(os.getcwd())
    say_warnings()
    with ending_unwritable():
        app(prog_name="acmc")
