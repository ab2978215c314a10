"""Loads by place as the page shows them: maps over images, shaded tokens, and mean k on the foreground.

Shapes: H x W pixels, S x S patches.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.loads import LoadMaps, Text
from acm_compiler.evaluation.results import Evaluation, Places
from acm_compiler.reporting.contents import Cell, Image, Table, data_uri
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
    """True if an image [H, W, 3] has so few pixels that they are shown as squares."""
    return max(picture.shape[:2]) * 2 <= _PIXELS


def picture_png(picture: Tensor) -> bytes:
    """An image [H, W, 3] in [0, 1] as PNG, small ones enlarged and large ones reduced to about the same size."""
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
    """All load maps beside their images, with the colour scale, as one figure; `names` of the budgets."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    rows, columns = len(maps.pictures), 1 + len(maps.loads)
    figure = new_figure(1.25 * columns + 0.9, 1.25 * rows + 0.4)
    axes = figure.add_subplot()
    for column, title in enumerate(["image", *(f"budget {names[budget]}" for budget in maps.loads)]):
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


_STOPS = 9
# of a place: what it is part of, what it shows, and what else there is
_WORDS: dict[Places, tuple[str, str, str]] = {
    "patches": ("image", "object", "background"),
    "frames": ("clip", "speech", "silence"),
}


def map_facts(maps: LoadMaps, found: Evaluation) -> dict[str, Any]:
    """Images beside their load maps at several budgets."""
    sites = f"all {maps.sites} sites" if maps.sites > 1 else "the one site"
    if maps.sites < maps.of_sites:
        sites = f"the {maps.sites} of {maps.of_sites} sites whose tokens have a place in the image"
    whole = any(b.asked not in maps.loads and b.asked >= 1 for b in found.budgets)
    return {
        "sites": sites,
        "caption": "At budget 1 every patch runs all learners, so it has no map." if whole else "",
        "headers": ["image", *(found.names[budget] for budget in maps.loads)],
        "rows": [_row(maps, example, found.names) for example in range(len(maps.pictures))],
        "scale": _scale(*maps.scale),
    }


def _row(maps: LoadMaps, example: int, names: Mapping[float, str]) -> list[Image]:
    picture = maps.pictures[example]
    row = [Image(data_uri(picture_png(picture), "png"), f"example {example + 1}", squares=is_small(picture))]
    for budget, load in maps.loads.items():
        low, high = float(load[example].min()), float(load[example].max())
        alt = f"load map of example {example + 1} at budget {names[budget]}: k / N from {low:.2f} to {high:.2f}"
        row.append(Image(data_uri(picture_png(load_colours(maps, budget, example)), "png"), alt, squares=True))
    return row


def _scale(low: float, high: float) -> dict[str, str]:
    from matplotlib.colors import to_hex

    stops = ",".join(to_hex(load_scale()(i / (_STOPS - 1))) for i in range(_STOPS))
    return {"low": f"{low:.2f}", "high": f"{high:.2f}", "colours": stops}


def text_facts(texts: Sequence[Text], names: Mapping[float, str]) -> dict[str, Any]:
    """Texts whose tokens are shaded by load, at each budget."""
    every: list[Tensor] = [load for text in texts for load in text.loads.values() if len(load)]
    low, high = (
        (min(float(load.min()) for load in every), max(float(load.max()) for load in every)) if every else (0, 1)
    )
    budgets = texts[0].loads if texts else ()
    return {
        "scale": _scale(low, high),
        "budgets": {names[b]: [_shaded(text, b, low, high) for text in texts] for b in budgets},
    }


def _shaded(text: Text, budget: float, low: float, high: float) -> dict[str, Any]:
    """The pieces on grounds of their loads, with blanks between words, so that text copied from here has them, too.

    Tokens stand apart, unless they say where words begin: then parts of a word stand together.
    """
    words = any(piece[:1].isspace() for piece in text.pieces)
    pieces: list[dict[str, str]] = []
    for piece, load in zip(text.pieces, text.loads[budget].tolist(), strict=True):
        ground, ink = _ground_and_ink((load - low) / max(high - low, 1e-6))
        blank = " " if pieces and (piece[:1].isspace() or not words) else ""
        pieces.append(
            {"blank": blank, "text": piece.strip() or "·", "ground": ground, "ink": ink, "load": f"{load:.2f}"}
        )
    return {"words": words, "pieces": pieces}


def _ground_and_ink(share: float) -> tuple[str, str]:
    """The scale's colour, and of black and white the one that stands out more from it (WCAG's contrast)."""
    from matplotlib.colors import to_hex

    colour = load_scale()(share)
    red, green, blue = ((c / 12.92) if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3])
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return to_hex(colour), "#000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#fff"


def foreground_facts(found: Evaluation) -> dict[str, Any] | None:
    """Mean k on the object or speech, and off it, at every budget, with the shuffled control; None if not known."""
    known = [(b, b.foreground) for b in found.budgets if b.foreground is not None and b.reached < 1]
    if not known:
        return None
    places = known[0][1].of
    whole, what, other = _WORDS[places]
    on, off = ("a part of the object", "the background") if places == "patches" else (what, other)
    the_object = "the object" if places == "patches" else what
    headers = ["budget", f"k on {the_object}", f"k on {other}", "ratio", "ratio when shuffled"]
    rows: list[list[Cell]] = [
        [
            found.names[b.asked],
            f"{use.on:.2f}",
            f"{use.off:.2f}",
            wording.ratio(use.ratio, use.ratio_error),
            wording.ratio(use.shuffled, use.shuffled_error),
        ]
        for b, use in known
    ]
    return {
        "heading": f"{what.capitalize()} against {other}",
        "text": f"Mean k over {places} that hold {on}, against {off}. As a control, the same k are shuffled over the "
        f"{places} of each {whole}: then the ratio must be 1. ± is one standard error.",
        "table": Table(f"k on {what} and on {other}", headers, [rows]),
    }
