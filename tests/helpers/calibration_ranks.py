"""One of several processes that calibrate together: `torchrun -m tests.helpers.calibration_ranks DIR`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import acm_compiler as acm
from acm_compiler.calibration.answer import default_answer
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.training.machine import open_machine
from tests.helpers.calibration_tiny import make_tiny, observed, texts


def calibrated() -> dict[str, Any]:
    """Observe, and calibrate, in float64, what processes share out: uneven parts of texts of unequal length."""
    batches = [{**batch, "x": batch["x"].double()} for batch in texts(32, batch=5)]
    records, seen = observed(make_tiny().double(), batches, answer=default_answer, sample=100, apart=True)
    for record in records.values():
        record.join()
    found = {"examples": seen.examples}
    found["seen"] = {name: [r.tokens, r.sample.vectors, r.sample.weights] for name, r in records.items()}
    model = make_tiny().double()
    options = Options(tokens=300, sample=200, gate_steps=10, local_steps=6, budgets=(0.5,), gradient_tokens=200)
    calibrate_on(model, masked(batches), options=options)
    table = conversion(model).table
    assert table is not None
    rows = [[point.share, point.knob, point.k_lo] for point in table.points]
    return found | {"weights": model.state_dict(), "rows": rows, "damage": conversion(model).damage}


def refused(rank: int) -> str:
    """The refusal of batches that differ from process to process."""
    try:
        acm.calibrate(make_tiny(), texts(20, seed=rank), tokens=100)
    except UsageError as error:
        return str(error)
    return ""


def main(directory: Path) -> None:
    """Calibrate, and keep what came of it."""
    torch.set_num_threads(1)
    rank = open_machine().rank
    torch.save(calibrated() | {"refused": refused(rank)}, directory / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
