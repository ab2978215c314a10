"""The chart of load over time: each clip's waveform, and below it the share of learners that its frames ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from acm_compiler.report.figures import dress, new_figure
from acm_compiler.report.sequence_loads import Clip, ClipLoads
from acm_compiler.report.theme import Theme, load_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW = 7.2, 1.5
_POINTS = 1200  # of a waveform; its highest and lowest values in each stretch


def clip_chart(loads: ClipLoads, theme: Theme) -> Figure:
    """One row per clip: the waveform in grey, what is speech shaded, and one line per budget."""
    figure = new_figure(_WIDTH, 0.6 + _ROW * len(loads.clips))
    rows = figure.subplots(len(loads.clips), 1, squeeze=False)[:, 0]
    for axes, clip in zip(rows, loads.clips, strict=True):
        _draw(axes, clip, loads.rate, theme)
    rows[-1].set_xlabel("seconds" if loads.rate else "samples")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, labelcolor=theme.ink, fontsize=9)
    figure.supylabel("share of learners run (k / N)", fontsize=9, color=theme.muted)
    return figure


def _draw(axes: Axes, clip: Clip, rate: int | None, theme: Theme) -> None:
    dress(axes, theme)
    end = len(clip.samples) / (rate or 1)
    places, low, high = envelope(clip.samples)
    axes.fill_between(places * end, 0.5 + 0.5 * low, 0.5 + 0.5 * high, color=theme.muted, alpha=0.35, linewidth=0)
    if clip.foreground is not None:
        axes.fill_between(
            np.linspace(0, end, len(clip.foreground)),
            0,
            clip.foreground.float().numpy(),
            step="mid",
            color=theme.fixed,
            alpha=0.12,
            linewidth=0,
            label="speech",
        )
    budgets = sorted(clip.loads)
    for i, budget in enumerate(budgets):
        load = clip.loads[budget].numpy()
        middles = (np.arange(len(load)) + 0.5) / len(load) * end
        colour = load_scale()(0.15 + 0.7 * i / max(1, len(budgets) - 1))
        axes.step(middles, load, where="mid", color=colour, linewidth=1.3, label=f"budget {budget:.2f}")
    axes.set(xlim=(0, end), ylim=(0, 1.02))


def envelope(samples: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places in [0, 1], and the lowest and highest value around each, the loudest being 1."""
    loudest = float(samples.abs().max()) or 1.0
    parts = np.array_split(samples.numpy() / loudest, min(_POINTS, len(samples)))
    places = (np.arange(len(parts)) + 0.5) / len(parts)
    return places, np.array([part.min() for part in parts]), np.array([part.max() for part in parts])
