"""`acmc report DIR`: charts, load maps, and one self-contained page about a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from acm_compiler.cli.eval import keep, measure
from acm_compiler.cli.options import BaseOption, CodeOption, DataOption, DirArgument, JsonOption, TaskOption
from acm_compiler.cli.output import Output
from acm_compiler.runs.given import Given, refuse_missing

if TYPE_CHECKING:
    from acm_compiler.evaluation.comparison import Comparison
    from acm_compiler.evaluation.loads import Loads
    from acm_compiler.evaluation.results import Evaluation
    from acm_compiler.evaluation.times import Times
    from acm_compiler.runs.opened import SavedRun

Kept = TypeVar("Kept", bound="Times | Comparison")
_LOOKED_AT = 64  # examples among which those for load maps are chosen


def report(
    directory: DirArgument,
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="A folder for the page; unset: DIR/report.")] = None,
    task: TaskOption = None,
    data: DataOption = None,
    base_model: BaseOption = None,
    allow_code: CodeOption = False,
    json: JsonOption = False,
) -> None:
    """Write DIR/report from DIR/eval.json, which is measured first where it is missing, bench.json and compare.json."""
    from acm_compiler.calibration.recalibrate import known_damages
    from acm_compiler.checkpoint import save_id
    from acm_compiler.evaluation import comparison, times
    from acm_compiler.passes.rewrite.conversion import conversion
    from acm_compiler.reporting.contents import Report
    from acm_compiler.reporting.figures import require_matplotlib
    from acm_compiler.reporting.write import write_report
    from acm_compiler.runs.opened import open_saved_run

    require_matplotlib()
    target = directory / "report" if out is None else out
    output = Output(json=json)
    refuse_missing(directory)
    # a file that cannot be read is said before anything is loaded, which would warn of it, and measured
    timed, compared = times.load_times(directory), comparison.load_comparison(directory)
    run = open_saved_run(directory, given=Given.read(task, data, base_model), allow_code=allow_code)
    found = _evaluation(run, output)
    loads = _loads(run, found)
    if loads.missing:
        output.note(f"no load maps: {loads.missing}")
    here = save_id(directory)  # a comparison without ACMs is of no save
    page = write_report(
        target,
        Report(
            title=run.name,
            description=run.recipe.description if run.recipe else "",
            evaluation=found,
            plan=conversion(run.model).plan,
            damages=known_damages(run.model),
            loads=loads,
            times=_unless_stale(timed, directory / times.FILE, "bench", (here,), output),
            comparison=_unless_stale(compared, directory / comparison.FILE, "compare", (here, None), output),
        ),
    )
    output.say(f"wrote {page}, and its charts as PNG and SVG beside it")
    output.document({"page": str(page), "files": sorted(path.name for path in page.parent.iterdir())})


def _evaluation(run: SavedRun, output: Output) -> Evaluation:
    """The evaluation that the folder holds of its model, which is measured first where there is none."""
    from acm_compiler.evaluation.results import load_evaluation

    found = load_evaluation(run.directory, run.evaluation_file)
    if found is not None and not run.has_measured(found):
        output.note("this folder's evaluation is of another model, or on other data")
        found = None
    if found is None:
        output.note("this folder holds no evaluation of its model yet, so that comes first (acmc eval)")
        found = measure(run, output)
        keep(run, found, output)
    return found


def _loads(run: SavedRun, found: Evaluation) -> Loads:
    """Loads by place on a few of the run's examples; the reason where they cannot be shown."""
    from acm_compiler.data import BatchStream
    from acm_compiler.errors import AcmError
    from acm_compiler.evaluation.loads import Loads, find_loads

    try:
        stream = BatchStream(dataset=run.data, batch=_LOOKED_AT, shuffle=True, count=_LOOKED_AT)
        return find_loads(run.model, found, lambda: next(stream.epoch()), run.task, dataset=run.data)
    except AcmError as error:  # the numbers are there already: a page without load maps is better than none
        return Loads(missing=error.what)


def _unless_stale(
    found: Kept | None, file: Path, verb: str, saves: tuple[str | None, ...], output: Output
) -> Kept | None:
    """Results that `acmc {verb}` kept in `file`, where they are of one of these saves."""
    if found is None or found.save in saves:
        return found
    output.note(f"{file} is of another model than the one here, and left out (acmc {verb})")
    return None
