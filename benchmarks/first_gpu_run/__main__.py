"""Run one command, or one of its parts; the package's docstring says how."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

import benchmarks.first_gpu_run as page
from benchmarks.first_gpu_run.parts import PARTS, Part, write_row
from benchmarks.first_gpu_run.runner import Run, why_no_time_counts


def main() -> None:
    """Read the command line; a part is run in this process, a command starts one for each of its parts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_gpu_run",
        description=page.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=PARTS)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/first_gpu_run"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--parts", nargs="+", metavar="NAME")
    parser.add_argument("--anyway", action="store_true")
    parser.add_argument("--part", metavar="NAME", help="run this one here; its rows are printed, or added to --rows")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of --part; it ends after a row")
    chosen = parser.parse_args()
    known = {part.name: part for part in PARTS[chosen.command]}
    if unknown := [name for name in (chosen.parts or [chosen.part or next(iter(known))]) if name not in known]:
        parser.error(f"no part {unknown[0]!r} of {chosen.command}; there are {', '.join(known)}")
    if chosen.part:
        run_part(known[chosen.part], chosen)
        return
    refusal = why_no_time_counts(chosen.out, dry=chosen.dry) if chosen.command != "correctness" else None
    if refusal and not chosen.anyway:
        parser.error(f"{refusal}; --anyway measures all the same")
    run = Run(command=chosen.command, out=chosen.out, dry=chosen.dry, minutes=chosen.minutes)
    sys.exit(run.all_of([known[name] for name in chosen.parts or known]))


def run_part(part: Part, chosen: argparse.Namespace) -> None:
    """Run it, or this process's share of it, here; a row that comes after its time is its last."""
    end, dry, rows = time.monotonic() + chosen.seconds, chosen.dry, chosen.rows
    if dry and part.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.helpers import triton_interpreter

        triton_interpreter.prepare()
    import torch

    from benchmarks.first_gpu_run.device import Device

    if not dry and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; --dry tries the commands on a CPU")
    device = Device("cpu" if dry else "cuda", tuple(chosen.share))
    torch.manual_seed(0)
    put = print if rows is None else lambda row: write_row(rows, {"part": part.name, **row})
    if device.share[0] == 0:
        put(device.facts())
    file, function = part.run.split(".")
    run = getattr(importlib.import_module(f"benchmarks.first_gpu_run.{file}"), function)
    with torch.set_grad_enabled(part.differentiates):
        for row in run(device, *part.given):
            put(row)
            if time.monotonic() > end:
                put({"stopped": "out of time"})
                break


if __name__ == "__main__":
    main()
