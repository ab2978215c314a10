"""Load maps: which patches of a picture ran how many learners.

Shapes: E examples, H x W pixels, S x S patches.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.batch_context import batch as batch_context
from acm_compiler.control import set_budget
from acm_compiler.conversion import conversion, sites
from acm_compiler.data import Batch
from acm_compiler.inputs import call_model
from acm_compiler.measure import undisturbed
from acm_compiler.report.figures import new_figure
from acm_compiler.report.patches import patch_k
from acm_compiler.report.theme import Theme, load_scale
from acm_compiler.tasks import Task
from acm_compiler.usage import record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES, BUDGETS = 6, 4
_PIXELS = 160
_INK = 0.7  # how much of an overlay is the picture where that is darkest or brightest
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
        return math.floor(low * _STEPS + 1e-6) / _STEPS, math.ceil(high * _STEPS - 1e-6) / _STEPS


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


def spread(budgets: Sequence[float], count: int = BUDGETS) -> list[float]:
    """At most `count` of the budgets below 1, evenly chosen, both ends included."""
    below = sorted({budget for budget in budgets if budget < 1})
    if len(below) <= count:
        return below
    return [below[round(i * (len(below) - 1) / (count - 1))] for i in range(count)]


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


def overlay(maps: LoadMaps, budget: float, example: int) -> Tensor:
    """One load map under its picture, [H, W, 3] in [0, 1].

    Where the picture is as bright as its median the colour is exactly the scale's; what is brighter is drawn in
    white on it, what is darker in black.
    """
    picture = maps.pictures[example]
    low, high = maps.scale
    load = (maps.loads[budget][example] - low) / max(high - low, 1e-6)
    load = F.interpolate(load[None, None], size=picture.shape[:2])[0, 0]
    colour = torch.from_numpy(load_scale()(load.numpy())[..., :3]).float()
    grey = picture.mean(-1, keepdim=True)
    away = grey - grey.median()
    return torch.lerp(colour, (away > 0).float(), _INK * away.abs())


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


def load_chart(maps: LoadMaps, theme: Theme) -> Figure:
    """All load maps beside their pictures, with the colour scale, as one figure."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    rows, columns = len(maps.pictures), 1 + len(maps.loads)
    figure = new_figure(1.25 * columns + 0.9, 1.25 * rows + 0.4)
    axes = figure.add_subplot()
    for column, title in enumerate(["picture", *(f"budget {budget:.2f}" for budget in maps.loads)]):
        axes.text(column + 0.47, -0.1, title, ha="center", fontsize=9, color=theme.ink)
    for row in range(rows):
        pictures = [maps.pictures[row], *(overlay(maps, budget, row) for budget in maps.loads)]
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
