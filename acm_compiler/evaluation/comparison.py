"""Methods beside each other on one model and its data: what `acmc compare` prints and keeps as `compare.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from acm_compiler.errors import counted
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import Interval, MetricResult, load_kept
from acm_compiler.files import write_file

SCHEMA = 1
FILE, TABLE = "compare.json", "compare.txt"
ACM = "acm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """MACs executed for an example, the mean as a share of the dense model's, and its 5th and 95th percentiles."""

    share: float
    macs: float
    macs_p5: float
    macs_p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one budget, a share of the dense model's MACs.

    `difference`: metric minus the dense model's. `to_acm`: metric minus that of the ACMs at the same cost, None outside
    of the costs that they were measured at. Both are paired over examples. `seconds`: measured, per example, eager.
    """

    budget: float
    cost: Cost
    metric: float
    metric_error: float
    difference: Interval
    to_acm: Interval | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted:
    """One method on corrupted images of one severity (0: as they are): the metric, and the share of the dense MACs."""

    severity: int
    metric: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """One method at its budgets.

    `masks`: what did not run was computed all the same, so its time says nothing. `steps`: of training; 0 for none.
    """

    name: str
    title: str
    masks: bool
    rows: tuple[Row, ...]
    unreached: tuple[float, ...] = ()
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All methods of one run, on n held-out examples from `groups` sources; `left_out`: a sentence for each method.

    `save` tells which saved model its ACMs are. `corrupted`: on corrupted images, by method, "dense" among them, at
    `corrupted_at`, a budget.
    """

    schema: int = SCHEMA
    recipe: str
    quick: bool
    metric: MetricResult
    methods: tuple[MethodResult, ...]
    n: int
    groups: int
    model: str
    dense_macs: float
    left_out: dict[str, str] = field(default_factory=dict)
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    threads: int
    save: str | None = None
    corrupted: dict[str, tuple[Corrupted, ...]] = field(default_factory=dict)
    corrupted_at: float | None = None

    @property
    def budgets(self) -> list[float]:
        """All budgets that any method ran at."""
        return sorted({row.budget for method in self.methods for row in method.rows})

    def at(self, budget: float) -> list[tuple[MethodResult, Row]]:
        """The methods at one budget, the best first."""
        found = [(method, row) for method in self.methods for row in method.rows if row.budget == budget]
        sign = 1 if self.metric.lower_is_better else -1
        return sorted(found, key=lambda pair: sign * pair[1].metric)

    def __str__(self) -> str:
        return comparison_table(self)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def headers(found: Comparison) -> list[str]:
    """The columns of the table of methods."""
    unit = wording.unit_of_difference(found.metric)
    return ["budget", "method", "MACs", found.metric.name, f"to dense, {unit}", f"to ACM, {unit}"]


def cells(found: Comparison, method: MethodResult, row: Row) -> list[str]:
    """One row of that table."""
    metric = found.metric
    return [
        wording.percent(row.budget, 0),
        method.title,
        wording.percent(row.cost.share),
        wording.score(row.metric, metric),
        wording.difference(row.difference, metric),
        "" if method.name == ACM else wording.difference(row.to_acm, metric),
    ]


def comparison_table(found: Comparison) -> str:
    """Methods by budget, the best first; then the dense model, and what was left out."""
    rows = [cells(found, method, row) for budget in found.budgets for method, row in found.at(budget)]
    rows.append(["", "dense model", wording.percent(1.0), wording.score(found.metric.dense, found.metric), "", ""])
    align = ("right", "left", *("right",) * 4)
    table = tabulate(rows, headers=headers(found), disable_numparse=True, colalign=align)
    return "\n".join([table, basis(found), *notes(found), *_corrupted(found)])


def _corrupted(found: Comparison) -> list[str]:
    """The table of corrupted images, where they were measured: metric and MACs by severity."""
    if not found.corrupted or found.corrupted_at is None:
        return []
    titles = {method.name: method.title for method in found.methods}
    levels = [row.severity for row in next(iter(found.corrupted.values()))]
    rows = [
        [titles.get(name, "dense model")]
        + [f"{wording.score(row.metric, found.metric)} ({wording.percent(row.share)})" for row in rows]
        for name, rows in found.corrupted.items()
    ]
    heads = ["method", *("as they are" if level == 0 else f"severity {level}" for level in levels)]
    table = tabulate(rows, headers=heads, disable_numparse=True, colalign=("left", *("right",) * len(levels)))
    at = wording.percent(found.corrupted_at, 0)
    return ["", table, f"on corrupted images at {at}: {found.metric.name}, and MACs in brackets; all kinds together"]


def basis(found: Comparison) -> str:
    """A sentence on what the numbers are of."""
    sources = "" if found.groups == found.n else f" from {counted(found.groups, 'source')}"
    return (
        f"{found.metric.name} measured on {counted(found.n, 'example')}{sources}, ± half of a 95 % interval over "
        "sources; budget and MACs: shares of the dense model's, executed, gates and routers included; to ACM: against "
        "ACMs at the same MACs, between two budgets each on a part of the examples"
    )


def notes(found: Comparison) -> list[str]:
    """A line for each method that was left out, at some budgets or at all."""
    lines = [f"left out: {name}: {reason}" for name, reason in found.left_out.items()]
    if trained := [method for method in found.methods if method.steps]:
        names = ", ".join(method.name for method in trained)
        lines.append(f"trained by {counted(trained[0].steps, 'step')} on the dense model's outputs: {names}")
    for method in found.methods:
        if method.unreached:
            out = ", ".join(wording.percent(budget, 0) for budget in method.unreached)
            lines.append(f"left out: {method.name} at {out}: below what it reaches once it is fitted")
    return lines


def save_comparison(directory: Path, found: Comparison) -> None:
    """Write `compare.json` and the table as `compare.txt`, each whole or not at all. StorageError."""
    write_file(directory / FILE, json.dumps(found.as_json(), indent=1))
    write_file(directory / TABLE, f"{found}\n")


def load_comparison(directory: Path) -> Comparison | None:
    """The directory's `compare.json`, None when there is none; StorageError when it cannot be read."""
    return load_kept(Comparison, directory / FILE, what="a comparison", again="compare again: acmc compare")
