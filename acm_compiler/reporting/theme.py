"""The colours of the report, on light and on dark ground.

Blue and orange, and the scale viridis, are told apart by people with any common kind of colour
blindness; beside colour, series differ in marker and line, and steps of a scale in brightness.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.colors import Colormap


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """One set of colours; `gates`, `fixed` and `dense` are those of the series."""

    name: str
    ground: str
    surface: str
    ink: str
    muted: str
    line: str
    gates: str
    fixed: str
    dense: str


LIGHT = Theme(
    name="light",
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
    name="dark",
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
    """What each colour means, for sites with these N: k where all have the same N, else k / N."""
    most = max(learners)
    alike = len(set(learners)) == 1
    labels = [f"k = {k}" if alike else f"k / N = {k / most:.2f}" for k in range(most + 1)]
    return list(zip(labels, colours_of_k(most), strict=True))


def variables(theme: Theme) -> str:
    """The theme as CSS variables."""
    names = ("ground", "surface", "ink", "muted", "line", "gates", "fixed")
    return ";".join(f"--{name}:{getattr(theme, name)}" for name in names)
