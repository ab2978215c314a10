"""`acmc bench DIR`: measured time of a saved model against the dense one, in one interleaved run."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acm_compiler.cli.options import (
    BaseOption,
    CodeOption,
    DataOption,
    DeviceOption,
    DirArgument,
    JsonOption,
    TaskOption,
)
from acm_compiler.cli.output import Output
from acm_compiler.runs.given import Given, by_commas, read_budgets

if TYPE_CHECKING:
    from acm_compiler.evaluation.bench import Contest
    from acm_compiler.evaluation.times import Row, Times
    from acm_compiler.runs.opened import SavedRun


_BUDGETS = (0.25, 0.5, 0.75, 1.0)


def bench(
    directory: DirArgument,
    budgets: Annotated[
        str | None,
        typer.Option(metavar="B,B,…", help="Shares of learner MACs, or 60%, or 11GMACs; unset: .25,.5,.75,1."),
    ] = None,
    batches: Annotated[str, typer.Option(metavar="N,N,…", help="Batch sizes.")] = "1,8,64",
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Rounds in which every contender is timed.")] = 11,
    verify: Annotated[bool, typer.Option("--verify", help="Only compare outputs, at every k.")] = False,
    device: DeviceOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    base_model: BaseOption = None,
    allow_code: CodeOption = False,
    json: JsonOption = False,
) -> None:
    """Check that the compiled model's outputs equal the eager one's, then print one row per contender, batch and
    budget, and keep them in the folder."""
    from acm_compiler.checkpoint import save_id
    from acm_compiler.evaluation.bench import break_even, check_answers, measure_model
    from acm_compiler.evaluation.evaluate import reachable
    from acm_compiler.evaluation.times import Times
    from acm_compiler.runs.opened import open_saved_run

    output = Output(json=json)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_news)
    sizes = _sizes(batches)
    given = Given.read(task, data, base_model)
    asked = None if budgets is None else read_budgets(directory, budgets)
    run = open_saved_run(directory, given=given, allow_code=allow_code, device=device)
    inputs = [(size, run.inputs(size)) for size in sizes]
    contest = _contest(run, output, allow_code=allow_code)
    output.progress("compiling, and comparing outputs at every k")
    error = check_answers(contest, inputs[-1][1])
    output.say(f"compiled and eager outputs agree at every k: largest relative error {error:.1e}")
    if verify:
        output.document({**_machine(run), "verified": True, "error": error, "rows": []})
        return
    shares = asked or [float(share) for share in reachable(run.model, _BUDGETS, say=output.note)]
    rows = measure_model(contest, inputs, budgets=shares, rounds=rounds, progress=output.progress)
    least = min(shares)
    even: dict[str, Any] = {"break_even_budget": least, "break_even_batch": break_even(rows, least)}
    times = Times(rows=tuple(rows), **_machine(run), save=save_id(directory), **even)
    _say(times, output)
    _keep(directory, times, output)
    output.document(times.as_json())


def _say(times: Times, output: Output) -> None:
    """The table of times, and from where on they are better than the dense model's."""
    output.table([_cells(row) for row in times.rows], headers=_HEADERS)
    even = times.break_even_batch
    where = f"from batch {even} on" if even is not None else "at none of the batch sizes measured"
    output.say(f"at budget {times.break_even_budget:.4g} it is faster than dense Inductor {where}")


def _is_news(record: logging.LogRecord) -> bool:
    """False for torch's remark, on compiling, that a machine with CUDA's tools has no GPU."""
    return not record.getMessage().startswith("No CUDA runtime is found")


_HEADERS = ("batch", "budget", "contender", "ms", "ratio", "q1", "q3", "MAC ratio", "error")


def _contest(run: SavedRun, output: Output, *, allow_code: bool) -> Contest:
    """The saved model against the dense one; against one with random weights, where only its class is to be had."""
    from acm_compiler.checkpoint import build_dense
    from acm_compiler.errors import ModelSourceError, StorageError, UsageError
    from acm_compiler.evaluation.bench import Contest

    answer, dense = run.task.answer, run.dense
    if dense is None:
        try:
            dense = build_dense(run.directory, allow_code=allow_code).to(next(run.model.parameters()))
        except (ModelSourceError, StorageError) as error:
            raise UsageError(
                "there is no dense model to compare with",
                where=str(run.directory),
                found=run.no_dense,
                fix="name the model before conversion: --base-model python:my_module:my_model",
            ) from error
        output.note("the dense model has random weights, which its time does not depend on")
    return Contest.of(dense, run.model, answer)


def _keep(directory: Path, times: Times, output: Output) -> None:
    """Write `bench.json`; a folder that cannot be written to is no failure, since the result is printed."""
    from acm_compiler.errors import StorageError
    from acm_compiler.evaluation.times import save_times

    try:
        output.say(f"kept in {save_times(directory, times)}; acmc report draws it")
    except StorageError as error:
        output.warn(str(error))


def _cells(row: Row) -> list[str]:
    budget = "" if row.budget is None else f"{row.budget:.4g}"
    error = "" if row.error is None else f"{row.error:.1e}"
    ratios = [f"{value:.3f}" for value in (row.ratio, row.ratio_q1, row.ratio_q3, row.mac_ratio)]
    return [str(row.batch), budget, row.contender, f"{row.time_ms:.3f}", *ratios, error]


def _machine(run: SavedRun) -> dict[str, Any]:
    """Versions and machine of a measurement."""
    import torch

    from acm_compiler.evaluation.bench import clock
    from acm_compiler.planning.call_times import device_name
    from acm_compiler.recipe.resolved import measured_with

    place = next(run.model.parameters()).device
    return {
        "versions": measured_with(("torch", "acm_compiler")),
        "device": device_name(place),
        "clock": clock(place.type)[0],
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _sizes(text: str) -> list[int]:
    """Batch sizes by commas, each once, in rising order. UsageError for others, and for none."""
    from acm_compiler.errors import UsageError

    parts = by_commas(text)
    wrong = next((part for part in parts if not part.isdecimal() or int(part) < 1), None if parts else text)
    if wrong is not None:
        raise UsageError("batch sizes must be such as 1,8,64", where="--batches", found=repr(wrong))
    return sorted(set(map(int, parts)))
