"""The chart of load over time: each clip's waveform, and below it the share of learners that its frames ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from acm_compiler.evaluation.loads import Clip, ClipLoads
from acm_compiler.reporting.figures import dress, new_figure
from acm_compiler.reporting.theme import Theme, load_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW = 7.2, 1.5
_COLUMNS = 600  # about one per pixel: more would only make the file larger


def clip_chart(loads: ClipLoads, theme: Theme, names: Mapping[float, str]) -> Figure:
    """One row per clip: the waveform in grey, what is speech shaded, and one line per budget, named by `names`."""
    figure = new_figure(_WIDTH, 0.6 + _ROW * len(loads.clips))
    rows = figure.subplots(len(loads.clips), 1, squeeze=False)[:, 0]
    for axes, clip in zip(rows, loads.clips, strict=True):
        _draw(axes, clip, loads.rate, theme, names)
    rows[-1].set_xlabel("seconds" if loads.rate else "samples")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, labelcolor=theme.ink, fontsize=9)
    figure.supylabel("share of learners run (k / N)", fontsize=9, color=theme.muted)
    return figure


def _draw(axes: Axes, clip: Clip, rate: int | None, theme: Theme, names: Mapping[float, str]) -> None:
    dress(axes, theme)
    end = len(clip.samples) / (rate or 1)
    places, low, high = envelope(clip.samples)
    axes.fill_between(places * end, 0.5 + 0.5 * low, 0.5 + 0.5 * high, color=theme.muted, alpha=0.35, linewidth=0)
    if clip.foreground is not None:
        runs = [(start * end, (stop - start) * end) for start, stop in stretches(clip.foreground)]
        axes.broken_barh(runs, (0, 1), facecolor=theme.fixed, alpha=0.12, linewidth=0, label="speech")
    budgets = sorted(clip.loads)
    for i, budget in enumerate(budgets):
        load = np.array([column.mean() for column in _columns(clip.loads[budget].numpy())])
        colour = load_scale()(0.15 + 0.7 * i / max(1, len(budgets) - 1))
        axes.step(_middles(load) * end, load, where="mid", color=colour, linewidth=1.3, label=f"budget {names[budget]}")
    axes.set(xlim=(0, end), ylim=(0, 1.02))


def envelope(samples: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places in [0, 1], and the lowest and highest value around each, the loudest being 1."""
    loudest = float(samples.abs().max()) or 1.0
    columns = _columns(samples.numpy() / loudest)
    low, high = np.array([column.min() for column in columns]), np.array([column.max() for column in columns])
    return _middles(low), low, high


def stretches(foreground: Tensor) -> list[tuple[float, float]]:
    """Beginning and end, in [0, 1], of each unbroken stretch of columns that are mostly foreground."""
    columns = _columns(foreground.float().numpy())
    there = np.array([False, *(column.mean() >= 0.5 for column in columns), False])
    edges = np.flatnonzero(there[1:] != there[:-1]) / len(columns)
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _columns(values: np.ndarray) -> list[np.ndarray]:
    """What each column of the chart shows of a clip."""
    return np.array_split(values, min(_COLUMNS, len(values)))


def _middles(column: np.ndarray) -> np.ndarray:
    return (np.arange(len(column)) + 0.5) / len(column)
