"""`acmc explain` and `acmc kernels`: what runs each ACM when it is compiled, and the GPU kernels with their tiles."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acm_compiler.cli.options import BaseOption, CodeOption, DataOption, DirArgument, JsonOption, TaskOption
from acm_compiler.cli.output import Output
from acm_compiler.runs.given import Given

if TYPE_CHECKING:
    from acm_compiler.codegen.gpu.ahead.build import Kernel
    from acm_compiler.codegen.gpu.gate_spec import GateSpec
    from acm_compiler.codegen.gpu.spec import KernelSpec
    from acm_compiler.planning.plan import Plan

_ARCHITECTURES = (80, 90)
_DTYPES = ("bf16", "fp16", "fp32", "tf32")
_NOT_BUILT = "not built"


def explain(
    directory: DirArgument,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="B", help="Examples in the traced call.")] = 2,
    task: TaskOption = None,
    data: DataOption = None,
    base_model: BaseOption = None,
    allow_code: CodeOption = False,
    json: JsonOption = False,
) -> None:
    """Trace the model's call and print one row per site."""
    from acm_compiler.backend.explanation import explain
    from acm_compiler.runs.opened import open_saved_run
    from acm_compiler.sources.inputs import split_inputs

    output = Output(json=json)
    run = open_saved_run(directory, given=Given.read(task, data, base_model), allow_code=allow_code)
    args, kwargs = split_inputs(run.inputs(batch))
    found = explain(run.model.eval(), *args, **kwargs)
    output.say(str(found))
    output.document({key: value for key, value in found.as_json().items() if key != "schema"})


def kernels(
    what: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A saved model or a plan; without it, the tile table.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per call, which choose the tiles.")] = 25216,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, or tf32 for rounded fp32 products.")] = "bf16",
    arch: Annotated[list[int] | None, typer.Option(min=80, metavar="SM", help="80, 90, ...; repeatable.")] = None,
    build: Annotated[bool, typer.Option("--build", help="Compile them, no GPU needed, and read the binaries.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the tile table, or the kernels of a model's sites."""
    from acm_compiler.codegen.gpu.tiles import choose_tiles
    from acm_compiler.errors import PackageMissing, UsageError, did_you_mean

    out = Output(json=json)
    if dtype not in _DTYPES:
        hint = did_you_mean(dtype, _DTYPES)
        raise UsageError(f"unknown dtype {dtype!r}{hint}", expected=f"one of {', '.join(_DTYPES)}")
    if what is None:
        if arch or build:
            option = "--arch" if arch else "--build"
            raise UsageError(f"{option} needs to know for which sites", fix="give a saved model or a plan")
        _show_table(out)
        return
    if importlib.util.find_spec("triton") is None:
        raise PackageMissing("Triton is not installed, which the kernels are written in", fix="pip install triton")
    rows = []
    for (spec, gate), count in _specs(what, dtype).items():
        for one in arch or _ARCHITECTURES:
            provenance = choose_tiles(spec, one, tokens).provenance
            for kernel, operands in _kernels(spec, gate, one, tokens):
                row = _row(kernel, operands, one, provenance=provenance, build=build)
                rows.append({"sites": f"{count} x {spec}", **row})
    out.table([list(row.values()) for row in rows], headers=list(rows[0]) if rows else [])
    out.document({"kernels": rows, "tokens": tokens})


def _show_table(out: Output) -> None:
    from acm_compiler.codegen.gpu.tiles import TABLE

    rows = [
        {
            "for": str(row),
            "layer1": str(row.tiles.layer1),
            "layer2": str(row.tiles.layer2),
            "provenance": row.tiles.provenance,
        }
        for row in TABLE
    ]
    out.table([list(row.values()) for row in rows], headers=list(rows[0]))
    out.document({"table": rows})


def _specs(what: Path, dtype: str) -> Counter[tuple[KernelSpec, GateSpec]]:
    """The specs of a model's sites and their gates, and how many sites have each."""
    from acm_compiler.codegen.gpu.gate_spec import gate_spec_of_site
    from acm_compiler.codegen.gpu.spec import spec_of_site

    sites = _plan(what).sites
    return Counter((spec_of_site(site, dtype), gate_spec_of_site(site, dtype)) for site in sites)


def _plan(what: Path) -> Plan:
    from acm_compiler.checkpoint.folder import PLAN
    from acm_compiler.errors import StorageError, UsageError
    from acm_compiler.planning.plan import Plan

    if not what.exists():
        raise UsageError(
            "no such file or folder", where=str(what), fix="name a saved model, or a plan: acmc plan --out"
        )
    path = what / PLAN if what.is_dir() else what
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(
            "no plan can be read here",
            where=str(path),
            found=getattr(error, "strerror", None) or error,
            fix="acmc plan WHAT --out plan.json makes one",
        ) from error


def _kernels(spec: KernelSpec, gate: GateSpec, arch: int, tokens: int) -> list[tuple[Kernel, str]]:
    """The kernels of a site, in order, with the dtype of their operands."""
    from acm_compiler.codegen.gpu.ahead.forward import gate_kernels_of, kernels_of

    return [(kernel, spec.dtype) for kernel in (*gate_kernels_of(gate, arch, tokens), *kernels_of(spec, arch, tokens))]


def _row(kernel: Kernel, dtype: str, arch: int, *, provenance: str, build: bool) -> dict[str, Any]:
    from acm_compiler.codegen.gpu.ahead.build import build as compile_kernel

    built = asdict(compile_kernel(kernel, dtype, arch)) if build else None
    row: dict[str, Any] = {
        "arch": f"sm_{arch}",
        "kernel": kernel.name,
        "tile": str(kernel.tile or ""),
        "provenance": provenance if kernel.tile else "",
    }
    for fact in ("registers", "spills", "shared_bytes", "resident"):
        row[fact] = _NOT_BUILT if built is None else built[fact]
    return row
