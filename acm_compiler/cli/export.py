"""`acmc export DIR`: a saved model as a program that takes its budget as an input, or with one k."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acm_compiler.cli.options import BaseOption, CodeOption, DataOption, DirArgument, JsonOption, TaskOption
from acm_compiler.cli.output import Output
from acm_compiler.runs.given import Given, by_commas, checked_budgets, refuse_missing

if TYPE_CHECKING:
    from acm_compiler.runs.opened import SavedRun
    from acm_compiler.sources.inputs import Inputs


def export(
    directory: DirArgument,
    format: Annotated[
        str, typer.Option(metavar="FORMAT", help="pt2: a program of torch.export; aoti: for C++; onnx; checkpoint.")
    ] = "pt2",
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="A new folder; unset: DIR/export/FORMAT.")] = None,
    controls: Annotated[
        str, typer.Option(metavar="C,C,…", help="Inputs beside the model's: budget, cap, k_lo, k_hi.")
    ] = "budget",
    per_example: Annotated[bool, typer.Option("--per-example", help="One budget per example.")] = False,
    dynamic: Annotated[
        list[str] | None, typer.Option(metavar="NAME:AXIS", help="A further axis of any length; repeatable.")
    ] = None,
    fixed_k: Annotated[
        int | None, typer.Option("--fixed-k", metavar="K", help="onnx, checkpoint: learners that every token runs.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="B", help="onnx, checkpoint: a fixed k per site, as its gates choose there.")
    ] = None,
    input: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Example input such as 1x3x224x224; unset: of the data.")
    ] = None,
    task: TaskOption = None,
    data: DataOption = None,
    base_model: BaseOption = None,
    allow_code: CodeOption = False,
    json: JsonOption = False,
) -> None:
    """Export the model, compare it with the live one, and print how it is called."""
    from acm_compiler.exporting import check_folder, check_format
    from acm_compiler.exporting import export as write
    from acm_compiler.files import parse_json
    from acm_compiler.runs.opened import open_saved_run
    from acm_compiler.sources.from_hf import processor_files_in

    check_format(format, fixed_k, budget)
    refuse_missing(directory)
    share = None if budget is None else _budget(directory, budget, input)
    target = check_folder(directory / "export" / format if out is None else out)
    axes, names, output = _axes(dynamic or []), by_commas(controls), Output(json=json)
    run = open_saved_run(directory, given=Given.read(task, data, base_model), allow_code=allow_code)
    inputs = _inputs(run, input, _TRACED if budget is None else _SAMPLE, output)
    options: dict[str, Any] = {"controls": names, "per_example": per_example, "dynamic": axes, "fixed_k": fixed_k}
    options |= {"budget": share, "extra": processor_files_in(directory) if format == "checkpoint" else None}
    file = write(run.model, target, inputs, format, **options)
    _report(output, file, parse_json((target / "export.json").read_text(encoding="utf-8")))


def _report(output: Output, file: Path, facts: dict[str, Any]) -> None:
    """Print what an export takes, or the k that it has, how far off it is, and how it is run."""
    if facts["inputs"]:
        rows = [[i["name"], i["dtype"], " x ".join(map(str, i["shape"])) or "one number"] for i in facts["inputs"]]
        output.table(rows, headers=_HEADERS)
    if facts["k"]:
        output.table([[site, k] for site, k in facts["k"].items()], headers=("site", "k"))
        output.say(f"every token runs {facts['learner_share']:.3f} of the learners' MACs")
    output.say(f"wrote {file}; its outputs are the model's, largest relative error {facts['relative_error']:.1e}")
    output.say(f"to run it: {facts['usage']}")
    output.document({"file": str(file), **{key: value for key, value in facts.items() if key != "format"}})


def _axes(texts: list[str]) -> dict[str, list[int]]:
    """The axes that --dynamic names, by input."""
    from acm_compiler.errors import UsageError

    axes: dict[str, list[int]] = {}
    for text in texts:
        name, _, axis = text.rpartition(":")
        if not name or not axis.isdigit():
            raise UsageError("no axis of an input", where="--dynamic", found=repr(text), expected="such as x:1")
        axes.setdefault(name, []).append(int(axis))
    return axes


_HEADERS = ("input", "type", "shape")
_TRACED = 2  # examples that a program is traced with
_SAMPLE = 32  # examples whose gates say what a budget's fixed k are


def _budget(directory: Path, text: str, shape: str | None) -> float | str:
    """The one budget; it needs examples of the data, as what gates choose for random inputs says nothing."""
    from acm_compiler.errors import UsageError

    asked = checked_budgets(directory, text)
    if len(asked) > 1:
        raise UsageError("there must be one budget", where="--budget", found=text, expected="such as 0.4")
    if shape is not None:
        fix = "leave --input out: examples come from the recipe's data, or from --data"
        raise UsageError("a budget's k are taken from data", where="--budget", found=f"--input {shape}", fix=fix)
    return asked[0]


def _inputs(run: SavedRun, shape: str | None, count: int, output: Output) -> Inputs:
    """The example inputs: of the shape given, else the first examples of the data, `count` at most.

    Where the recipe's data are not here, two of its examples' shape do, but not for gates to choose on.
    """
    from acm_compiler.data import count_examples
    from acm_compiler.errors import AcmError
    from acm_compiler.sources.inputs import fit_to, make_inputs, parse_input

    if shape is not None:
        return fit_to(run.model, make_inputs(run.model, parse_input(shape)))
    try:
        return run.inputs(min(count, count_examples(run.data)))
    except AcmError as error:
        example = None if count > _TRACED or run.given.data is not None else run.example()
        if example is None:
            raise
        output.note(f"traced with an example of the recipe's shape, since its data cannot be read: {error.what}")
        return example
