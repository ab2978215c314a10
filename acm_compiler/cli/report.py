"""`acmc report DIR`: charts, load maps, and one self-contained page about a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acm_compiler.cli.eval import CodeOption, keep, measure
from acm_compiler.cli.output import JsonOption, Output

if TYPE_CHECKING:
    from acm_compiler.cli.saved_run import SavedRun
    from acm_compiler.report.evaluation import Evaluation
    from acm_compiler.report.load_maps import LoadMaps

_LOOKED_AT = 64  # examples among which those for load maps are chosen


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("report", help="Write charts and an HTML page about a saved model.")(report)


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that acmc rewrite wrote.")],
    allow_code: CodeOption = False,
    json: JsonOption = False,
) -> None:
    """Write DIR/report from DIR/eval.json, which is measured first where it is missing."""
    from acm_compiler.cli.saved_run import open_saved_run
    from acm_compiler.conversion import conversion
    from acm_compiler.report.contents import Report
    from acm_compiler.report.evaluation import load_evaluation
    from acm_compiler.report.figures import require_matplotlib
    from acm_compiler.report.write import write_report

    require_matplotlib()
    output = Output(json=json)
    run = open_saved_run(directory, allow_code=allow_code)
    found = load_evaluation(directory)
    if found is None:
        output.note("this folder holds no evaluation yet, so that comes first (acmc eval)")
        found = measure(run, output)
        keep(directory, found, output)
    maps, no_maps = _load_maps(run, found)
    if maps is None:
        output.note(f"no load maps: {no_maps}")
    page = write_report(
        directory / "report",
        Report(
            title=run.name,
            description=run.recipe.description if run.recipe else "",
            evaluation=found,
            plan=conversion(run.model).plan,
            maps=maps,
            no_maps=no_maps,
        ),
    )
    output.say(f"wrote {page}, and its charts as PNG and SVG beside it")
    output.document({"page": str(page), "files": sorted(path.name for path in page.parent.iterdir())})


def _load_maps(run: SavedRun, found: Evaluation) -> tuple[LoadMaps | None, str]:
    """Load maps of a few of the run's examples; None and the reason where there are none."""
    from acm_compiler.data import BatchStream
    from acm_compiler.errors import AcmError
    from acm_compiler.report.load_maps import find_load_maps, spread

    budgets = spread([budget.asked for budget in found.budgets])
    if not budgets:
        return None, "no budget below 1 was measured"
    try:
        data = run.data()
        task = run.task(data)
        batch = next(BatchStream(dataset=data, batch=_LOOKED_AT, shuffle=True).epoch())
        maps = find_load_maps(run.model, batch, task, budgets)
    except AcmError as error:  # the numbers are there already: a page without pictures is better than none
        return None, error.what
    return maps, "the data holds no pictures, or the model's tokens have no known place in them"
