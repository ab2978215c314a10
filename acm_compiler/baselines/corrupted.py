"""A fitted method on corrupted images: does it stay right, and does it spend more where an image is harder?"""

from __future__ import annotations

import torch
from torch import Tensor

from acm_compiler.baselines.measure import Measured
from acm_compiler.baselines.method import Method, Subject
from acm_compiler.data.batch import first_examples, size_of
from acm_compiler.data.corruptions import KINDS, SEVERITIES, corrupted
from acm_compiler.evaluation.comparison import Corrupted
from acm_compiler.progress import Progress
from acm_compiler.sources.inputs import call_model

EXAMPLES = 300
LEVELS = (0.0, *map(float, SEVERITIES))  # 0: as they are


def measure_corrupted(method: Method, budget: float, progress: Progress) -> Measured:
    """Scores and MACs of the first held-out images by severity, all kinds of corruption together."""
    task = method.subject.task
    scores: dict[float, list[Tensor]] = {level: [] for level in LEVELS}
    macs: dict[float, list[Tensor]] = {level: [] for level in LEVELS}
    units: list[Tensor] = []
    for batch in progress.fed(first_examples(method.subject.held_out(), EXAMPLES)):
        if task.needs_dense:
            with torch.no_grad():
                batch = task.remember(call_model(method.subject.dense, task.inputs(batch)), batch)
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
