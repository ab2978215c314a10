"""Figures as files, drawn by matplotlib's own objects, and the colours of the report on light and dark ground.

Blue and orange, and the scale viridis, are told apart by people with any common kind of colour
blindness; beside colour, series differ in marker and line, and steps of a scale in brightness.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from acm_compiler.errors import require_packages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axes._secondary_axes import SecondaryAxis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure


_PNG_DPI = 200
_PAD = 0.1
# matplotlib writes coordinates of paths to a millionth of a point: a hundredth can be seen, and is half as long
_PATH, _FINE = re.compile(r' d="[^"]*"'), re.compile(r"(\.\d\d)\d+")


def require_matplotlib() -> None:
    """Raise PackageMissing when there is no matplotlib."""
    require_packages(("matplotlib",), "a report", "viz")


@contextmanager
def drawing() -> Iterator[None]:
    """While open, figures are made in the report's style; matplotlib's own settings come back at the end."""
    import matplotlib

    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "acm_compiler",
        "text.parse_math": False,  # a user's `$` is a dollar
    }
    with matplotlib.rc_context(style):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, on a transparent ground."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=_PAD, h_pad=_PAD))
    figure.patch.set_alpha(0)
    FigureCanvasAgg(figure)
    return figure


def new_plot(width: float, height: float, theme: Theme) -> tuple[Figure, Axes]:
    """A figure with one plot, whose values are easy to read off."""
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    dress(axes, theme)
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    return figure, axes


def mark_dense(axes: Axes, metric: float, theme: Theme) -> None:
    """The dense model in a plot over shares of its MACs."""
    axes.axhline(metric, color=theme.muted, linewidth=1, linestyle=(0, (1, 2.5)), zorder=1)
    axes.plot([1], [metric], "D", color=theme.dense, markersize=7, label="dense model", zorder=7)


def add_legend(figure: Figure, theme: Theme, *, columns: int, size: int = 9, **named: Any) -> None:
    """The key of a figure, above its plots; `named`: handles and labels, else those of all plots."""
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, labelcolor=theme.ink, fontsize=size, **named)


def series_colours(count: int, first: float = 0.15, last: float = 0.85) -> list[Any]:
    """Colours of so many series that have an order, from a part of the scale."""
    return [load_scale()(place) for place in np.linspace(first, last, count)]


def dress(axes: Axes, theme: Theme) -> None:
    """The frame of a plot: quiet lines, left and below only."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.line)
    axes.tick_params(colors=theme.muted, labelcolor=theme.muted, length=3)
    axes.xaxis.label.set_color(theme.muted)
    axes.yaxis.label.set_color(theme.muted)
    axes.set_axisbelow(True)


def dress_top(axes: SecondaryAxis, theme: Theme) -> None:
    """An axis above a plot, as quiet as the others."""
    axes.spines["top"].set_visible(False)
    axes.tick_params(colors=theme.gates, labelcolor=theme.gates, length=0, labelsize=9)
    axes.xaxis.label.set_color(theme.gates)


def fix_layout(figure: Figure) -> None:
    """Lay the figure out once and for all, for figures that are saved in several formats."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def as_svg(figure: Figure, ground: str = "none") -> bytes:
    """The figure as SVG on a ground, or on none: the same bytes for the same figure, its text in the page's font."""
    out = io.StringIO()
    with _on(figure, ground):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "acm_compiler"})
    drawn = _PATH.sub(lambda path: _FINE.sub(r"\1", path[0]), out.getvalue())
    return drawn.replace("'DejaVu Sans'", FONT.replace('"', "'")).encode()


def as_png(figure: Figure, ground: str) -> bytes:
    """The figure as PNG on an opaque ground."""
    out = io.BytesIO()
    with _on(figure, ground):
        figure.savefig(out, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return out.getvalue()


@contextmanager
def _on(figure: Figure, ground: str) -> Iterator[None]:
    """While open, the figure has this ground; figures are made transparent, and `savefig` would leave them so."""
    figure.patch.set(alpha=None, facecolor=ground)
    try:
        yield
    finally:
        figure.patch.set_alpha(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """One set of colours; `gates`, `fixed` and `dense` are those of the series."""

    ground: str
    surface: str
    ink: str
    muted: str
    line: str
    gates: str
    fixed: str
    dense: str


LIGHT = Theme(
    ground="#faf9f6",
    surface="#ffffff",
    ink="#1c1e22",
    muted="#5d626c",
    line="#e4e2dc",
    gates="#0b62ad",
    fixed="#c4560b",
    dense="#1c1e22",
)
DARK = Theme(
    ground="#131519",
    surface="#1b1e24",
    ink="#eceae5",
    muted="#a6abb6",
    line="#30343d",
    gates="#74b6f3",
    fixed="#f2a25c",
    dense="#eceae5",
)
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


@functools.cache
def load_scale() -> Colormap:
    """The scale of k / N: viridis without its brightest end, on which white could not be seen."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"](np.linspace(0.02, 0.84, 256)))


@functools.cache
def colours_of_k(learners: int) -> tuple[str, ...]:
    """N + 1 colours of that scale from dark (k = 0) to bright (k = N), as #rrggbb."""
    from matplotlib.colors import to_hex

    return tuple(to_hex(load_scale()(k / max(1, learners))) for k in range(learners + 1))


def key_of_k(learners: Collection[int]) -> list[tuple[str, str]]:
    """Legend of the colours, for sites with these N: k where all have the same N, else k / N."""
    most = max(learners)
    alike = len(set(learners)) == 1
    labels = [f"k = {k}" if alike else f"k / N = {k / most:.2f}" for k in range(most + 1)]
    return list(zip(labels, colours_of_k(most), strict=True))


def variables(theme: Theme) -> str:
    """The theme as CSS variables."""
    names = ("ground", "surface", "ink", "muted", "line", "gates", "fixed")
    return ";".join(f"--{name}:{getattr(theme, name)}" for name in names)
