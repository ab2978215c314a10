"""One of two processes that calibrate together; run by test_calibration_ranks."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed as dist

from acm_compiler.calibration.answer import default_answer
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.passes.rewrite.conversion import conversion
from tests.helpers.calibration_tiny import make_tiny, observed, texts


def main(directory: Path, rank: int) -> None:
    """Observe and calibrate on this process's half of the data; write what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory / 'meet'}", rank=rank, world_size=2)
    batches = texts(16)[rank::2]
    records, _ = observed(make_tiny(), batches, answer=default_answer, seed=rank)
    for record in records.values():
        record.join()
    seen = {
        name: (r.tokens, r.moments.mean, r.moments.covariance, r.metric.value(12, r.home), r.sample.vectors)
        for name, r in records.items()
    }
    model = make_tiny()
    calibrate_on(model, masked(texts(40)[rank::2]), options=Options(tokens=200, gate_steps=5, budgets=(0.5,)))
    table = conversion(model).table
    assert table is not None
    found = {"seen": seen, "weights": model.state_dict(), "table": asdict(table), "damage": conversion(model).damage}
    torch.save(found, directory / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
