"""`acmc report DIR`: charts, load maps, and one self-contained page about a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acm_compiler.cli.eval import CodeOption, keep, known_damages, measure
from acm_compiler.cli.output import JsonOption, Output

if TYPE_CHECKING:
    from acm_compiler.cli.saved_run import SavedRun
    from acm_compiler.evaluation.results import Evaluation

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
    from acm_compiler.evaluation.results import load_evaluation
    from acm_compiler.reporting.contents import Report
    from acm_compiler.reporting.figures import require_matplotlib
    from acm_compiler.reporting.write import write_report

    require_matplotlib()
    output = Output(json=json)
    run = open_saved_run(directory, allow_code=allow_code)
    found = load_evaluation(directory)
    if found is not None and found.subject not in (None, run.subject):
        output.note("this folder's evaluation is of another model, or on other data")
        found = None
    if found is None:
        output.note("this folder holds no evaluation of its model yet, so that comes first (acmc eval)")
        found = measure(run, output)
        keep(directory, found, output)
    loads, no_loads = _loads(run, found)
    if no_loads:
        output.note(f"no load maps: {no_loads}")
    page = write_report(
        directory / "report",
        Report(
            title=run.name,
            description=run.recipe.description if run.recipe else "",
            evaluation=found,
            plan=conversion(run.model).plan,
            damages=known_damages(run),
            no_maps=no_loads,
            **loads,
        ),
    )
    output.say(f"wrote {page}, and its charts as PNG and SVG beside it")
    output.document({"page": str(page), "files": sorted(path.name for path in page.parent.iterdir())})


def _loads(run: SavedRun, found: Evaluation) -> tuple[dict[str, Any], str]:
    """Load maps of a few of the run's pictures, or loads along clips or texts; the reason where there are none."""
    from acm_compiler.conversion import conversion
    from acm_compiler.data import BatchStream
    from acm_compiler.errors import AcmError
    from acm_compiler.evaluation.load_maps import find_load_maps, spread
    from acm_compiler.evaluation.sequence_loads import find_clip_loads, find_text_loads

    budgets = spread([budget.asked for budget in found.budgets], own=conversion(run.model).default_budget)
    if not budgets:
        return {}, "no budget below 1 was measured"
    try:
        data = run.data()
        task = run.task(data)
        batch = next(BatchStream(dataset=data, batch=_LOOKED_AT, shuffle=True).epoch())
        if "input_values" in batch:
            return {"clips": find_clip_loads(run.model, batch, task, budgets, rate=getattr(data, "rate", None))}, ""
        if "input_ids" in batch:
            pieces = getattr(data, "pieces", None)
            return {"texts": find_text_loads(run.model, batch, task, budgets, pieces=pieces)}, ""
        maps = find_load_maps(run.model, batch, task, budgets)
    except AcmError as error:  # the numbers are there already: a page without pictures is better than none
        return {}, error.what
    why = "the data holds no pictures, or the model's tokens have no known place in them"
    return {"maps": maps}, "" if maps is not None else why
