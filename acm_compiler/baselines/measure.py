"""A method's scores and MACs on the held-out examples, as they are and corrupted, kept in the folder of a comparison.

A comparison that was killed goes on with the next method.

    compare/run.json    what all of them belong to: the recipe's decisions, the examples
    compare/NAME.json   one method's scores and MACs, example by example

Shapes: E examples.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from acm_compiler.baselines.method import Method, Subject
from acm_compiler.data import Batch
from acm_compiler.data.batch import first_examples, size_of, sources_of
from acm_compiler.data.corruptions import KINDS, SEVERITIES, corrupted
from acm_compiler.errors import UsageError
from acm_compiler.evaluation.comparison import Corrupted, Cost, MethodResult, Row
from acm_compiler.evaluation.statistics import Sample, Spent, against_fixed
from acm_compiler.files import parse_json, storing, write_file
from acm_compiler.progress import Progress
from acm_compiler.recipe import first_differences
from acm_compiler.sources.inputs import call_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of one method: for each budget a score and MACs per example, [E], and seconds per example.

    units_E, groups_E: what each example counts for, and its source. unreached: budgets that the method could not be set
    to once it was fitted. steps: those that a model was trained by.
    """

    units_E: Tensor
    groups_E: Tensor
    scores: dict[float, Tensor]
    macs: dict[float, Tensor]
    seconds: dict[float, float] = field(default_factory=dict)
    unreached: tuple[float, ...] = ()
    steps: int = 0


def measure(method: Method, budgets: Sequence[float], progress: Progress) -> Measured:
    """Run a fitted method at every budget that it reaches, in one pass over the held-out examples."""
    task = method.subject.task
    reached = [budget for budget in budgets if method.reaches(budget)]
    scores: dict[float, list[Tensor]] = {budget: [] for budget in reached}
    macs: dict[float, list[Tensor]] = {budget: [] for budget in reached}
    seconds = dict.fromkeys(reached, 0.0)
    units: list[Tensor] = []
    groups: list[Tensor] = []
    for batch in _remembered(method.subject, progress.fed(method.subject.held_out())):
        for budget in reached:
            began = monotonic()
            ran = method.run(batch, budget)
            seconds[budget] += monotonic() - began
            scores[budget].append(ran.score_B)
            macs[budget].append(ran.macs_B)
        groups.append(sources_of(batch, sum(map(len, groups))))
        units.append(task.units(batch).cpu())
        progress.advance(examples=size_of(batch))
    groups_E = torch.cat(groups)
    return Measured(
        units_E=torch.cat(units),
        groups_E=groups_E,
        scores={budget: torch.cat(parts) for budget, parts in scores.items()},
        macs={budget: torch.cat(parts) for budget, parts in macs.items()},
        seconds={budget: spent / len(groups_E) for budget, spent in seconds.items()},
        unreached=tuple(budget for budget in budgets if budget not in reached),
    )


def _remembered(subject: Subject, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, with what the task keeps of the dense model's outputs."""
    for batch in batches:
        if subject.task.needs_dense:
            with torch.no_grad():
                batch = subject.task.remember(call_model(subject.dense, subject.task.inputs(batch)), batch)
        yield batch


def result_of(
    name: str, method: type[Method], found: Measured, *, sample: Sample, dense: Measured, ours: Measured | None
) -> MethodResult:
    """The rows of one method, beside the dense model and, at equal cost, beside ours."""
    dense_macs, dense_E = float(dense.macs[1.0].nanmean()), dense.scores[1.0]
    controls = [] if ours is None else [Spent(share=_mean(ours, b), score_E=ours.scores[b]) for b in ours.scores]
    rows = []
    for budget, score_E in found.scores.items():
        here = Spent(share=_mean(found, budget), score_E=score_E)
        rows.append(
            Row(
                budget=budget,
                cost=_cost(found.macs[budget], dense_macs),
                metric=sample.value(score_E),
                metric_error=sample.error(score_E),
                difference=sample.difference(score_E, dense_E),
                to_acm=None if found is ours else against_fixed(here, controls, sample),
                seconds=found.seconds.get(budget),
            )
        )
    return MethodResult(
        name=name,
        title=method.title,
        masks=method.masks,
        rows=tuple(rows),
        unreached=found.unreached,
        steps=found.steps,
    )


def _mean(found: Measured, budget: float) -> float:
    return float(found.macs[budget].nanmean())


def _cost(macs_E: Tensor, dense_macs: float) -> Cost:
    low, high = torch.nanquantile(macs_E.double(), torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    mean = float(macs_E.double().nanmean())
    return Cost(share=mean / dense_macs, macs=mean, macs_p5=low, macs_p95=high)


EXAMPLES = 300
LEVELS = (0.0, *map(float, SEVERITIES))  # 0: as they are


def measure_corrupted(method: Method, budget: float, progress: Progress) -> Measured:
    """Scores and MACs of the first held-out images by severity, all kinds of corruption together."""
    task = method.subject.task
    scores: dict[float, list[Tensor]] = {level: [] for level in LEVELS}
    macs: dict[float, list[Tensor]] = {level: [] for level in LEVELS}
    units: list[Tensor] = []
    batches = first_examples(method.subject.held_out(), EXAMPLES)
    for batch in _remembered(method.subject, progress.fed(batches)):
        begin = sum(map(len, units))
        index = range(begin, begin + size_of(batch))
        units.append(task.units(batch).cpu())
        for level in LEVELS:
            for kind in KINDS if level else (None,):
                image = batch["image"] if kind is None else corrupted(batch["image"], kind, int(level), index)
                ran = method.run({**batch, "image": image}, budget)
                scores[level].append(ran.score_B)
                macs[level].append(ran.macs_B)
        progress.advance(examples=size_of(batch))
    return Measured(
        units_E=torch.cat(units),
        groups_E=torch.zeros(0),
        scores={level: torch.cat(parts) for level, parts in scores.items()},
        macs={level: torch.cat(parts) for level, parts in macs.items()},
    )


def levels_of(found: Measured, subject: Subject) -> tuple[Corrupted, ...]:
    """The metric and the share of the dense model's MACs at each severity."""
    task, model = subject.task, subject.plan.model
    rows = []
    for level, score_E in found.scores.items():
        # units are those of the images as they are; every kind shows all of them once, batch by batch
        unit_E = torch.ones_like(score_E) * found.units_E.mean()
        share = float(found.macs[level].nanmean()) * model.batch / model.dense_macs
        rows.append(Corrupted(severity=int(level), metric=task.value(score_E, unit_E), share=share))
    return tuple(rows)


_FOLDER, _RUN = "compare", "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores kept below one folder, for a run that is `of` this."""

    directory: Path
    of: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of all methods."""
        return self.directory / _FOLDER

    def check(self) -> None:
        """UsageError where the folder holds the scores of another run."""
        before = _read(self.folder / _RUN)
        if before is None:
            return
        if changed := first_differences(before, parse_json(json.dumps(self.of))):
            raise UsageError(
                f"the folder holds the comparison of another run (there -> now):\n  {changed}",
                where=str(self.folder),
                fix="choose another folder by --out; or start over: --force",
            )

    def begin(self, *, anew: bool) -> None:
        """Make the folder; `anew` without what was there."""
        with storing(self.folder):
            if anew and self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self.folder / _RUN, json.dumps(dict(self.of), indent=1))

    def load(self, name: str, budgets: tuple[float, ...], *, steps: int = 0) -> Measured | None:
        """The scores of a method, trained by so many steps, at these budgets; None where they are not whole."""
        found = _read(self.folder / f"{name}.json")
        if found is None or sorted(map(float, (*found["scores"], *found["unreached"]))) != sorted(budgets):
            return None
        if found.get("steps", 0) != steps:
            return None
        return Measured(
            units_E=torch.tensor(found["units"]),
            groups_E=torch.tensor(found["groups"]),
            scores={float(budget): torch.tensor(part) for budget, part in found["scores"].items()},
            macs={float(b): torch.tensor(part, dtype=torch.float64) for b, part in found["macs"].items()},
            seconds={float(budget): spent for budget, spent in found["seconds"].items()},
            unreached=tuple(found["unreached"]),
            steps=steps,
        )

    def save(self, name: str, found: Measured) -> None:
        """Keep a method's scores, whole or not at all. StorageError."""
        document = {
            "units": found.units_E.tolist(),
            "groups": found.groups_E.tolist(),
            "scores": {repr(budget): part.tolist() for budget, part in found.scores.items()},
            "macs": {repr(budget): part.tolist() for budget, part in found.macs.items()},
            "seconds": {repr(budget): spent for budget, spent in found.seconds.items()},
            "unreached": list(found.unreached),
            "steps": found.steps,
        }
        write_file(self.folder / f"{name}.json", json.dumps(document))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
