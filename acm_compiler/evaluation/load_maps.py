"""Load maps: which patches of a picture ran how many learners.

Shapes: E examples, H x W pixels, S x S patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.evaluation.loads import patch_k
from acm_compiler.inputs import call_model
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.control import set_budget
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.runtime.usage import record
from acm_compiler.tasks import Task

EXAMPLES, BUDGETS = 6, 4
_STEPS = 20  # the ends of the scale are whole twentieths


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMaps:
    """Pictures [E, H, W, C] in [0, 1] and, for each budget, mean k / N over the sites at every patch [E, S, S].

    `sites` of the model's `of_sites` sites have tokens with a place in the picture.
    """

    pictures: Tensor
    loads: dict[float, Tensor]
    sites: int
    of_sites: int

    @property
    def scale(self) -> tuple[float, float]:
        """The ends of the one colour scale that all maps share."""
        low = min(float(load.min()) for load in self.loads.values())
        high = max(float(load.max()) for load in self.loads.values())
        # a hair of tolerance, or 0.25 / 0.05 would round down to 4 steps
        first, last = math.floor(low * _STEPS + 1e-6), math.ceil(high * _STEPS - 1e-6)
        if first == last:  # one load everywhere: a scale needs two ends
            first, last = max(first - 1, 0), min(last + 1, _STEPS)
        return first / _STEPS, last / _STEPS


def find_load_maps(model: nn.Module, batch: Batch, task: Task, budgets: Sequence[float]) -> LoadMaps | None:
    """Load maps of a few examples of `batch` at the given budgets; None where tokens have no place in a picture.

    Examples of different labels are preferred. Mode, choices and budget of the model come back at the end.
    """
    image = batch.get("image")
    if image is None or image.dim() != 4 or not budgets:
        return None
    rows = _different(batch)
    device = next(iter(sites(model).values())).k_lo.device
    shown = {name: value[rows].to(device) for name, value in batch.items()}
    loads: dict[float, Tensor] = {}
    found = 0
    with undisturbed(model):
        for budget in budgets:
            set_budget(model, budget)
            with batch_context(model, mask=task.mask(shown)), record(model, macs=False) as usage:
                call_model(model, task.inputs(shown))
            placed = patch_k(usage.k, conversion(model).plan, *image.shape[-2:])
            if not placed:
                return None
            found = len(placed)
            loads[budget] = _mean_load(model, placed)
    return LoadMaps(pictures=_for_eyes(image[rows]), loads=loads, sites=found, of_sites=len(sites(model)))


def spread(budgets: Sequence[float], own: float | None = None, count: int = BUDGETS) -> list[float]:
    """At most `count` of the budgets below 1, evenly chosen: both ends, and `own`, the one that the model is set to."""
    below = sorted({budget for budget in budgets if budget < 1})
    if len(below) <= count:
        return below
    chosen = [below[round(i * (len(below) - 1) / (count - 1))] for i in range(count)]
    if own in below and own not in chosen:
        chosen[min(range(1, count - 1), key=lambda i: abs(chosen[i] - own))] = own
    return chosen


def _different(batch: Batch) -> list[int]:
    """Rows of up to `EXAMPLES` examples, first those whose label was not seen before."""
    size = len(batch["image"])
    labels = batch["label"].tolist() if "label" in batch and batch["label"].dim() == 1 else list(range(size))
    new = [row for row in range(size) if labels[row] not in labels[:row]]
    others = [row for row in range(size) if row not in set(new)]
    return sorted((new + others)[:EXAMPLES])


def _mean_load(model: nn.Module, placed: dict[str, Tensor]) -> Tensor:
    """Mean over sites of k / N, on the finest of their grids."""
    side = max(k.shape[-1] for k in placed.values())
    acms = sites(model)
    loads = [F.interpolate((k / acms[name].count)[:, None], size=(side, side))[:, 0] for name, k in placed.items()]
    return torch.stack([load.cpu() for load in loads]).mean(0)


def _for_eyes(image: Tensor) -> Tensor:
    """Standardised pictures [E, C, H, W] as [E, H, W, C] in [0, 1]: each from its darkest to its brightest value."""
    image = image.detach().float().cpu()
    low, high = image.amin((1, 2, 3), keepdim=True), image.amax((1, 2, 3), keepdim=True)
    scaled = ((image - low) / (high - low).clamp_min(1e-6)).movedim(1, -1)
    return scaled if scaled.shape[-1] == 3 else scaled.mean(-1, keepdim=True).expand(-1, -1, -1, 3)
