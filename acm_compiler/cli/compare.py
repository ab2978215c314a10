"""`acmc compare --recipe R --out DIR`: other methods beside ours, on the model and data of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acm_compiler.cli.options import JsonOption, RecipeOption, SetOption
from acm_compiler.cli.output import Output
from acm_compiler.errors import UsageError
from acm_compiler.runs.given import by_commas

if TYPE_CHECKING:
    from acm_compiler.evaluation.comparison import Comparison


def compare(
    recipe: RecipeOption,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the result goes, the converted model too; unset: runs/NAME."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="M,M,…", help="Which methods, or all; unset: every one without training.")
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(metavar="B,B,…", help="Shares of the whole dense model's MACs: .4 or 40%; unset: .25 to .75."),
    ] = None,
    ablate: Annotated[
        str | None, typer.Option(metavar="A,A,…", help="The paper's phases without a part, by commas, or all.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Steps of each training; unset: 600.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first look: measure on 1,200 held-out examples.")] = False,
    corruptions: Annotated[bool, typer.Option("--corruptions", help="Measure corrupted images, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start over, and replace what is in the folder.")] = False,
    overrides: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Measure each method at each budget; a comparison that was stopped goes on."""
    from acm_compiler.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    directory = out or Path("runs") / loaded.name
    from acm_compiler.baselines.compare import STEPS, Options, compare

    output = Output(json=json)
    output.progress(f"{loaded.name}: the comparison goes to {directory}")
    given = {"--methods": methods, "--ablate": ablate, "--budgets": budgets, "--steps": str(steps) if steps else None}
    options = Options(
        directory=directory,
        methods=None if methods is None else by_commas(methods),
        ablations=None if ablate is None else by_commas(ablate),
        budgets=None if budgets is None else _shares(budgets),
        steps=steps or STEPS,
        quick=quick,
        corruptions=corruptions,
        force=force,
        command=_command(recipe, directory, overrides or [], given, {"--quick": quick, "--corruptions": corruptions}),
    )
    _show(compare(loaded, options, say=output.progress), directory, output)


def _shares(text: str) -> list[float]:
    """Budgets by commas, as shares of the dense model's MACs. UsageError for others."""
    shares = []
    for part in by_commas(text):
        number, percent = part.removesuffix("%"), part.endswith("%")
        try:
            share = float(number) / (100 if percent else 1)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            fix = f"{part}%?" if share > 1 and not percent else None
            expected = "shares of the dense model's MACs, such as .4 or 40%"
            raise UsageError("no budget of a comparison", where="--budgets", found=part, expected=expected, fix=fix)
        shares.append(share)
    if not shares:
        raise UsageError("no budgets given", where="--budgets", found=repr(text), expected="such as .25,.5 or 25%,50%")
    return shares


def _show(found: Comparison, directory: Path, output: Output) -> None:
    """Print a comparison, and draw `compare.png` and `compare.svg`; a note where there is no matplotlib."""
    from acm_compiler.errors import PackageMissing
    from acm_compiler.reporting.comparison_chart import write_chart

    output.say(str(found))
    try:
        write_chart(directory, found)
    except PackageMissing as error:
        output.note(f"no chart: {error.what}")
    output.document(found.as_json() | {"directory": str(directory)})
    output.say(f"compared in {directory}: compare.txt, compare.json")


def _command(
    recipe: str, directory: Path, overrides: list[str], given: dict[str, str | None], flags: dict[str, bool]
) -> str:
    """The command that goes on with a comparison."""
    import shlex

    words = ["acmc", "compare", "--recipe", recipe, "--out", str(directory)]
    words += [word for option, value in given.items() if value is not None for word in (option, value)]
    words += [part for override in overrides for part in ("--set", override)]
    return shlex.join([*words, *(flag for flag, is_on in flags.items() if is_on)])
