"""`acmc serve DIR`: a saved model over HTTP, whose budget follows the load."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import typer

from acm_compiler.cli.options import BaseOption, CodeOption, DataOption, DeviceOption, DirArgument, TaskOption
from acm_compiler.cli.output import Output
from acm_compiler.errors import UsageError, require_packages
from acm_compiler.runs.given import Given

SloOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Time that 95 of 100 requests must meet, such as 50ms; unset: one budget."),
]
BudgetsOption = Annotated[
    str | None, typer.Option(metavar="LOW:HIGH", help="Budgets to choose from, such as .25:1; a single one is kept.")
]
LossOption = Annotated[
    float | None, typer.Option(min=0, metavar="L", help="Largest loss of the metric that a budget may cost.")
]
LengthOption = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Tokens of a text; unset: the model's, 512 at most.")
]
QuantizeOption = Annotated[
    Literal["int8", "int4"] | None, typer.Option(help="Give learners weights of this type first, as acm.quantize does.")
]
RecalibrateOption = Annotated[
    Literal["asked", "drift"] | None,
    typer.Option(help="Measure budgets anew on recent inputs, on POST /recalibrate; drift: by itself, too."),
]


def serve(
    directory: DirArgument,
    slo: SloOption = None,
    budgets: BudgetsOption = None,
    max_loss: LossOption = None,
    host: Annotated[str, typer.Option(metavar="H", help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="P", help="Port to listen on; 0: any.")] = 8000,
    max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Inputs in a batch.")] = 32,
    max_wait: Annotated[str, typer.Option(metavar="TIME", help="How long a batch waits to be filled.")] = "2ms",
    max_waiting: Annotated[int, typer.Option(min=1, metavar="N", help="Inputs that may wait.")] = 4096,
    max_inputs: Annotated[int, typer.Option(min=1, metavar="N", help="Inputs in a request.")] = 256,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Bytes in a request.")] = "16MB",
    max_length: LengthOption = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model first, by backend acm.")] = False,
    quantize: QuantizeOption = None,
    recalibrate: RecalibrateOption = None,
    device: DeviceOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    base_model: BaseOption = None,
    allow_code: CodeOption = False,
) -> None:
    """Answer requests until a signal comes, then finish those that were taken."""
    require_packages(("fastapi", "prometheus_client", "python_multipart", "uvicorn"), "serving", "serve")
    from acm_compiler.files import bytes_of
    from acm_compiler.serving.batcher import Limits
    from acm_compiler.serving.open_served import ModelOptions
    from acm_compiler.serving.server import Bounds, ServerOptions, bind, open_and_serve

    given = Given.read(task, data, base_model)
    limits = Limits(batch=max_batch, wait_s=seconds_of(max_wait, "--max-wait"), waiting=max_waiting)
    server = ServerOptions(
        max_body=bytes_of(max_body, "--max-body"), max_inputs=max_inputs, limits=limits, recalibrate=recalibrate
    )
    slo_s = None if slo is None else seconds_of(slo, "--slo")
    bounds = Bounds(slo_s=slo_s, budgets=budgets, max_loss=max_loss)
    options = ModelOptions(
        device=device, compiled=compiled, quantized=quantize, longest=max_length, allow_code=allow_code
    )
    with bind(host, port) as at:
        open_and_serve(directory, given, options, bounds, server, at, Output().progress)


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


def seconds_of(text: str, option: str) -> float:
    """The seconds that a time such as 50ms or 1.5s is. UsageError for others."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        expected = "a number and its unit, ms or s, such as 50ms or 1.5s"
        raise UsageError(f"{option} must be a time", found=repr(text), expected=expected)
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1)
