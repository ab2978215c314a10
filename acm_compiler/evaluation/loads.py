"""Loads by place, of a few examples: learners run along a clip, a text, or the patches of an image.

Shapes: E examples, S places of one example (real ones only), B clips, R samples of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.data.batch import Facts
from acm_compiler.evaluation.places import patch_k
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.passes.rewrite.conversion import conversion, rewritten, sites
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.control import set_budget
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.runtime.usage import Usage, record
from acm_compiler.sources.inputs import call_model
from acm_compiler.tasks import Task

# so many are shown at most
CLIPS, TEXTS, EXAMPLES, BUDGETS = 4, 6, 6, 4
_STEPS = 20  # the ends of the colour scale are whole twentieths
_NO_PLACES = "the data holds no images, or the model's tokens have no known place in them"
Pieces = Callable[[Sequence[int]], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A waveform [R], where something is said [R] if that is known, and k / N over time [S] at each budget."""

    samples: Tensor
    foreground: Tensor | None
    loads: dict[float, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLoads:
    """Clips and their loads; `rate` is samples per second, None where nobody said."""

    clips: tuple[Clip, ...]
    rate: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The pieces of a text and k / N of each [S] at each budget."""

    pieces: tuple[str, ...]
    loads: dict[float, Tensor]


def find_clip_loads(
    model: nn.Module, batch: Batch, task: Task, budgets: Sequence[float], *, rate: int | None = None
) -> ClipLoads | None:
    """Loads over time of the first clips of `batch`; None where it holds no audio. The model stays as it was."""
    if batch.get("input_values") is None or batch["input_values"].dim() != 2 or not budgets:
        return None
    shown = {name: value[:CLIPS] for name, value in batch.items()}
    audio = shown["input_values"].cpu()
    lengths = shown["attention_mask"].sum(1).tolist() if "attention_mask" in shown else [audio.shape[1]] * len(audio)
    speech = shown.get("foreground")
    loads = {budget: usage.load() for budget, usage in usage_at(model, shown, task, budgets).items()}
    clips = tuple(
        Clip(
            samples=audio[i, :length],
            foreground=None if speech is None else speech[i, :length].cpu(),
            loads={budget: _real(load[i]) for budget, load in loads.items()},
        )
        for i, length in enumerate(lengths)
    )
    return ClipLoads(clips=clips, rate=rate)


def find_text_loads(
    model: nn.Module, batch: Batch, task: Task, budgets: Sequence[float], *, pieces: Pieces | None
) -> tuple[Text, ...] | None:
    """Loads by token of the first texts of `batch`; None where it holds no tokens. The model stays as it was.

    pieces: the text of each token, for a text's token numbers; None: the numbers themselves are shown.
    """
    if batch.get("input_ids") is None or not budgets:
        return None
    shown = {name: value[:TEXTS] for name, value in batch.items()}
    loads = {budget: usage.load() for budget, usage in usage_at(model, shown, task, budgets).items()}
    if next(iter(loads.values())).shape[1] != shown["input_ids"].shape[1]:
        return None
    texts = []
    for i, ids in enumerate(shown["input_ids"].tolist()):
        real = ~next(iter(loads.values()))[i].isnan()
        kept = [token for token, is_real in zip(ids, real.tolist(), strict=True) if is_real]
        written = [str(token) for token in kept] if pieces is None else pieces(kept)
        texts.append(Text(pieces=tuple(written), loads={budget: _real(load[i]) for budget, load in loads.items()}))
    return tuple(texts)


def usage_at(model: nn.Module, batch: Batch, task: Task, budgets: Sequence[float]) -> dict[float, Usage]:
    """Usage on a batch at each budget. Mode, choices and budget of the model come back at the end."""
    device = next(iter(sites(model).values())).k_lo.device
    there = {name: value.to(device) for name, value in batch.items()}
    (inputs, mask_BS), found = task.call_arguments(there), {}
    with undisturbed(rewritten(model)):
        for budget in budgets:
            set_budget(model, budget)
            with batch_context(model, mask=mask_BS), record(model, macs=False) as usage:
                call_model(model, inputs)
            found[budget] = usage
    return found


def _real(load_S: Tensor) -> Tensor:
    return load_S[~torch.isnan(load_S)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMaps:
    """Images [E, H, W, C] in [0, 1] and, for each budget, mean k / N over the sites at every patch [E, S, S].

    `sites` of the model's `of_sites` sites have tokens with a place in the image.
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
    """Load maps of a few examples of `batch` at the given budgets; None where tokens have no place in an image.

    Examples of different labels are preferred. The model stays as it was.
    """
    image = batch.get("image")
    if image is None or image.dim() != 4 or not budgets:
        return None
    rows, searched = _different(batch), rewritten(model)
    used = usage_at(model, {name: value[rows] for name, value in batch.items()}, task, budgets)
    placed = {budget: patch_k(usage.k, searched.plan, *image.shape[-2:]) for budget, usage in used.items()}
    found = len(placed[budgets[0]])
    if not found:
        return None
    loads = {budget: _mean_load(model, at_budget) for budget, at_budget in placed.items()}
    return LoadMaps(pictures=_for_eyes(image[rows]), loads=loads, sites=found, of_sites=len(searched.acms))


def spread(budgets: Sequence[float], own: float | None = None) -> list[float]:
    """A few of the budgets below 1, evenly chosen: both ends, and `own`, the one that the model is set to."""
    below = sorted({budget for budget in budgets if budget < 1})
    if len(below) <= BUDGETS:
        return below
    chosen = [below[round(i * (len(below) - 1) / (BUDGETS - 1))] for i in range(BUDGETS)]
    if own in below and own not in chosen:
        chosen[min(range(1, BUDGETS - 1), key=lambda i: abs(chosen[i] - own))] = own
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
    """Standardised images [E, C, H, W] as [E, H, W, C] in [0, 1]: each from its darkest to its brightest value."""
    image = image.detach().float().cpu()
    low, high = image.amin((1, 2, 3), keepdim=True), image.amax((1, 2, 3), keepdim=True)
    scaled = ((image - low) / (high - low).clamp_min(1e-6)).movedim(1, -1)
    return scaled if scaled.shape[-1] == 3 else scaled.mean(-1, keepdim=True).expand(-1, -1, -1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Load maps of images, or loads along clips or texts; `missing` is the reason where there are none."""

    maps: LoadMaps | None = None
    clips: ClipLoads | None = None
    texts: tuple[Text, ...] | None = None
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
