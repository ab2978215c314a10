"""Where a model's learners run, in whatever a batch holds: pictures, clips or texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from acm_compiler.data import Batch
from acm_compiler.data.facts import Facts
from acm_compiler.evaluation.load_maps import LoadMaps, find_load_maps, spread
from acm_compiler.evaluation.loads import ClipLoads, TextLoads, find_clip_loads, find_text_loads
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.tasks import Task

_NO_PLACES = "the data holds no pictures, or the model's tokens have no known place in them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Load maps of pictures, or loads along clips or texts; `missing` says why there are none."""

    maps: LoadMaps | None = None
    clips: ClipLoads | None = None
    texts: TextLoads | None = None
    missing: str = ""


def find_loads(
    model: nn.Module, found: Evaluation, draw: Callable[[], Batch], task: Task, *, dataset: Any = None
) -> Loads:
    """Loads of a few examples of the batch that `draw` gives, at a few of the budgets that were measured.

    dataset: what may know the `rate` of clips and the `pieces` of texts.
    """
    budgets: Sequence[float] = spread([b.asked for b in found.budgets], own=conversion(model).default_budget)
    if not budgets:
        return Loads(missing="no budget below 1 was measured")
    batch = draw()
    if "input_values" in batch:
        return Loads(clips=find_clip_loads(model, batch, task, budgets, rate=Facts.of(dataset).rate))
    if "input_ids" in batch:
        return Loads(texts=find_text_loads(model, batch, task, budgets, pieces=Facts.of(dataset).pieces))
    maps = find_load_maps(model, batch, task, budgets)
    return Loads(maps=maps, missing="" if maps is not None else _NO_PLACES)
