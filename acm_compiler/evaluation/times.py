"""Measured times of a saved model beside the dense one: what `acmc bench` prints and keeps as `bench.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acm_compiler.evaluation.results import load_kept
from acm_compiler.evaluation.wording import budget_names
from acm_compiler.files import write_file
from acm_compiler.planning.call_times import CallTime, CallTimes

SCHEMA = 1
FILE = "bench.json"
BASE, OURS = "dense inductor", "acm compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender at one batch size; `ratio` is its time over dense Inductor's, `mac_ratio` its MACs over the dense
    model's, `error` the relative difference of its outputs from the eager model's at that budget."""

    batch: int
    budget: float | None
    contender: str
    time_ms: float
    ratio: float
    ratio_q1: float
    ratio_q3: float
    mac_ratio: float
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """All rows of one run, and what they were measured with; `save` tells which saved model they are of.

    `break_even_batch`: from which batch size on the model is faster than dense Inductor at `break_even_budget`.
    """

    schema: int = SCHEMA
    rows: tuple[Row, ...]
    versions: dict[str, str]
    device: str
    clock: str
    threads: int
    date: str
    save: str | None = None
    break_even_budget: float | None = None
    break_even_batch: int | None = None

    @property
    def names(self) -> dict[float, str]:
        """Name of each budget, in rising order; no two alike."""
        return budget_names(sorted({row.budget for row in self.rows if row.budget is not None}))

    def of(self, contender: str, batch: int) -> list[Row]:
        """The rows of one contender at one batch size, by rising budget."""
        found = [row for row in self.rows if (row.contender, row.batch) == (contender, batch)]
        return sorted(found, key=lambda row: row.budget or 0)

    @property
    def of_calls(self) -> CallTimes:
        """The times of the compiled converted model, by which budgets are chosen."""
        ours = [row for row in self.rows if row.contender == OURS]
        calls = (CallTime(batch=row.batch, budget=row.budget, ms=row.time_ms) for row in ours if row.budget is not None)
        return CallTimes(device=self.device, calls=tuple(calls))

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def save_times(directory: Path, times: Times) -> Path:
    """Write `bench.json` into the directory, whole or not at all; returns its path. StorageError."""
    write_file(directory / FILE, json.dumps(times.as_json(), indent=1))
    return directory / FILE


def load_times(directory: Path) -> Times | None:
    """The directory's `bench.json`, None when there is none; StorageError when it cannot be read."""
    return load_kept(Times, directory / FILE, what="times", again="measure again: acmc bench DIR")
