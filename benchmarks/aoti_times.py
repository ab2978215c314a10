"""Time of an exported package beside the model that it is of: eager, compiled by backend "acm", and as a package.

    OMP_NUM_THREADS=1 python -m benchmarks.aoti_times runs/digits --batch 1 --batch 64

DIR is a saved model of a recipe with data. All run on one thread, in turn, `--rounds` times at each budget; printed is
the processor time of each, and its ratio to the compiled model's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import acm_compiler as acm
from acm_compiler.evaluation.bench import interleave
from acm_compiler.exporting.aoti import runner
from acm_compiler.recipe.resolved import installed_versions
from acm_compiler.runs.opened import open_saved_run

BUDGETS = (0.25, 0.4, 0.6, 0.8, 1.0)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--batch", type=int, action="append", help="examples in a call; repeatable")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = (run := open_saved_run(options.directory)).model
    inputs: Any = run.inputs(2)
    if not isinstance(inputs, Tensor):
        parser.error("this compares models of one tensor")
    with TemporaryDirectory() as folder:
        file = acm.export(model, folder, inputs, "aoti")
        facts = json.loads(file.with_name("export.json").read_text())
        print(f"relative error over its budgets {facts['relative_error']:.1e}; {file.stat().st_size / 1e6:.1f} MB")
        package = runner(file.parent)
    compiled: Any = torch.compile(model, backend="acm", dynamic=True)
    print(f"processor {facts['processor']}, {installed_versions()}")
    for batch in options.batch or [1, 64]:
        x: Any = run.inputs(batch)
        for budget in BUDGETS:
            acm.set_budget(model, budget)
            share = torch.tensor(budget)
            ways: dict[str, Callable[[], Any]] = {
                "eager": lambda x=x: model(x),
                "compiled": lambda x=x: compiled(x),
                "package": lambda x=x, share=share: package(x, budget=share),
            }
            times = interleave(ways, base="compiled", rounds=options.rounds)
            shown = ", ".join(f"{name} {t.time_ms:.2f} ms ({t.ratio:.2f})" for name, t in times.items())
            difference = (package(x, budget=share) - model(x)).abs().max() / model(x).abs().max()
            print(f"batch {batch}, budget {budget:.2f}: {shown}; difference {float(difference):.1e}")


if __name__ == "__main__":
    main()
