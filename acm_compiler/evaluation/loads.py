"""Loads along a sequence: how many learners the frames of a clip, or the tokens of a text, ran.

Shapes: E examples, S places of one example (real ones only), R samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acm_compiler.data import Batch
from acm_compiler.inputs import call_model
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.control import set_budget
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.runtime.usage import record
from acm_compiler.tasks import Task

CLIPS, TEXTS = 4, 6
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLoads:
    """Texts and their loads."""

    texts: tuple[Text, ...]


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
    loads = _loads(model, shown, task, budgets)
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
) -> TextLoads | None:
    """Loads by token of the first texts of `batch`; None where it holds no tokens. The model stays as it was.

    pieces: the text of each token, for a text's token numbers; None: the numbers themselves are shown.
    """
    if batch.get("input_ids") is None or not budgets:
        return None
    shown = {name: value[:TEXTS] for name, value in batch.items()}
    loads = _loads(model, shown, task, budgets)
    if next(iter(loads.values())).shape[1] != shown["input_ids"].shape[1]:
        return None
    texts = []
    for i, ids in enumerate(shown["input_ids"].tolist()):
        real = ~next(iter(loads.values()))[i].isnan()
        kept = [token for token, is_real in zip(ids, real.tolist(), strict=True) if is_real]
        written = [str(token) for token in kept] if pieces is None else pieces(kept)
        texts.append(Text(pieces=tuple(written), loads={budget: _real(load[i]) for budget, load in loads.items()}))
    return TextLoads(texts=tuple(texts))


def _loads(model: nn.Module, batch: Batch, task: Task, budgets: Sequence[float]) -> dict[float, Tensor]:
    """k / N [E, S] at each budget, nan at padding."""
    device = next(iter(sites(model).values())).k_lo.device
    there = {name: value.to(device) for name, value in batch.items()}
    found = {}
    with undisturbed(model):
        for budget in budgets:
            set_budget(model, budget)
            with batch_context(model, mask=task.mask(there)), record(model, macs=False) as usage:
                call_model(model, task.inputs(there))
            found[budget] = usage.load()
    return found


def _real(load_S: Tensor) -> Tensor:
    return load_S[~torch.isnan(load_S)]
