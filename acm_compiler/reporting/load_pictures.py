"""Load maps as pictures, beside the pictures they are of: one colour per patch, which its load alone decides.

Shapes: H x W pixels, S x S patches.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acm_compiler.evaluation.load_maps import LoadMaps
from acm_compiler.reporting.figures import Theme, load_scale, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS = 160


def load_colours(maps: LoadMaps, budget: float, example: int) -> Tensor:
    """One load map [S, S, 3] in [0, 1]: every patch in the scale's colour of its load."""
    low, high = maps.scale
    load = (maps.loads[budget][example] - low) / (high - low)
    return torch.from_numpy(load_scale()(load.numpy())[..., :3]).float()


def is_small(picture: Tensor) -> bool:
    """Whether a picture [H, W, 3] has so few pixels that they are shown as squares."""
    return max(picture.shape[:2]) * 2 <= _PIXELS


def picture_png(picture: Tensor) -> bytes:
    """A picture [H, W, 3] in [0, 1] as PNG, small ones enlarged and large ones reduced to about the same size."""
    from PIL import Image

    made = Image.fromarray((picture * 255).round().to(torch.uint8).numpy())
    height, width = picture.shape[:2]
    if max(height, width) > _PIXELS:
        made.thumbnail((_PIXELS, _PIXELS), Image.Resampling.LANCZOS)
    else:
        times = max(1, _PIXELS // max(height, width))
        made = made.resize((width * times, height * times), Image.Resampling.NEAREST)
    out = io.BytesIO()
    made.save(out, format="PNG", optimize=True)
    return out.getvalue()


def load_chart(maps: LoadMaps, theme: Theme, names: Mapping[float, str]) -> Figure:
    """All load maps beside their pictures, with the colour scale, as one figure; `names` of the budgets."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    rows, columns = len(maps.pictures), 1 + len(maps.loads)
    figure = new_figure(1.25 * columns + 0.9, 1.25 * rows + 0.4)
    axes = figure.add_subplot()
    for column, title in enumerate(["picture", *(f"budget {names[budget]}" for budget in maps.loads)]):
        axes.text(column + 0.47, -0.1, title, ha="center", fontsize=9, color=theme.ink)
    for row in range(rows):
        pictures = [maps.pictures[row], *(load_colours(maps, budget, row) for budget in maps.loads)]
        for column, picture in enumerate(pictures):
            extent = (column, column + 0.94, row + 0.94, row)
            axes.imshow(picture.numpy(), extent=extent, interpolation="nearest")
    axes.set(xlim=(0, columns), ylim=(rows, -0.3), aspect="equal")
    axes.set_axis_off()
    bar = figure.colorbar(ScalarMappable(Normalize(*maps.scale), load_scale()), ax=axes, shrink=0.6, aspect=30)
    bar.set_label("mean share of learners run (k / N)", color=theme.muted, fontsize=9)
    bar.ax.tick_params(colors=theme.muted, labelcolor=theme.muted, labelsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure
