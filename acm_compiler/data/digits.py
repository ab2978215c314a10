"""Cluttered digits: real handwritten digits, enlarged and placed at random among stroke fragments and noise.

The digits are scikit-learn's 1797 scans of 8x8 pixels. A fixed quarter of them, stratified by class, is held out:
canvases of the `eval` split show (also as clutter) only digits that no `train` canvas has ever shown. Most of a
canvas is background, so most tokens of a vision transformer are, too.

Shapes: B canvases, M tiles, T tile side, H = W canvas side, F fragments per canvas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from acm_compiler.data.batch import Batch
from acm_compiler.data.draws import normal, uniform
from acm_compiler.errors import DataError

Split = Literal["train", "eval"]
SIDE = 36
CLASSES = 10
MEAN, STD = 0.25, 0.25
_SPLIT_SEED = 1797  # which digits are held out must never depend on a run's seed
_HELD_OUT = 0.25
_DETAIL = 24  # the 8x8 scans are enlarged once to this side, smoothly, and sampled from there
_SCALE = (1.5, 2.5)
_TILE, _FRAGMENT_TILE = 22, 12
_FRAGMENTS = 5
_LAYOUT = 8  # random numbers per tile
_NOISE = 0.08
_INK = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitBank:
    """The source digits of one split: `image` [n, T, T] in [0, 1], `label` [n], `source` [n] (scikit-learn's row)."""

    image: Tensor
    label: Tensor
    source: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvases:
    """`image` uint8 [B, H, W]; `foreground` bool [B, H, W], the digit's ink; `label` [B]; `source` [B]."""

    image: Tensor
    foreground: Tensor
    label: Tensor
    source: Tensor

    def __getitem__(self, rows: Tensor) -> Canvases:
        return Canvases(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@functools.cache
def digit_bank(split: Split) -> DigitBank:
    """The source digits of `split`, which the other split does not have. DataError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "cluttered digits are made from scikit-learn's digits, and scikit-learn is not installed",
            fix="pip install 'acm_compiler[demo]'",
        ) from error
    scans = load_digits()
    label = torch.from_numpy(scans.target).long()
    rows = _rows_of(split, label)
    small = torch.from_numpy(scans.images).float()[rows, None] / 16
    large = F.interpolate(small, size=_DETAIL, mode="bicubic", align_corners=False).clamp(0, 1)
    return DigitBank(image=large[:, 0], label=label[rows], source=rows)


def _rows_of(split: Split, label: Tensor) -> Tensor:
    """Rows of one split in a fixed random order, a quarter of every class being the eval split's."""
    draw = uniform(_SPLIT_SEED, range(len(label)), 2)
    held_out = torch.zeros(len(label), dtype=torch.bool)
    for digit in range(CLASSES):
        of_class = (label == digit).nonzero()[:, 0]
        of_class = of_class[draw[of_class, 0].argsort(stable=True)]
        held_out[of_class[: round(_HELD_OUT * len(of_class))]] = True
    order = draw[:, 1].argsort(stable=True)
    return order[held_out[order] == (split == "eval")]


def canvases(split: Split, indices: Sequence[int] | Tensor, *, seed: int = 0, clutter: float = 1.0) -> Canvases:
    """The canvases of `split` with these indices (any int >= 0); each is a function of the arguments alone.

    Index i shows source digit i modulo the split's size, so every source is shown equally often. `clutter` scales
    how bright the stroke fragments are and how strong the noise is; 0 leaves the digit alone on black.
    """
    bank = digit_bank(split)
    index_B = torch.as_tensor(indices, dtype=torch.long)
    rows = index_B.numpy()
    layout = uniform(2 * seed, rows, _LAYOUT * (1 + _FRAGMENTS)).view(-1, 1 + _FRAGMENTS, _LAYOUT)
    shown = index_B % len(bank.label)
    pad = _FRAGMENT_TILE
    canvas = torch.zeros(len(rows), SIDE + 2 * pad, SIDE + 2 * pad)
    tile, corner = _digits(bank, shown, layout[:, 0])
    _stamp(canvas, tile, corner + pad)
    inner = slice(pad, pad + SIDE)
    foreground = canvas[:, inner, inner] > _INK
    for fragment in range(1, 1 + _FRAGMENTS):
        tile, corner = _fragments(bank, layout[:, fragment])
        _stamp(canvas, tile * clutter, corner + pad)
    noise = normal(2 * seed + 1, rows, SIDE * SIDE).view(-1, SIDE, SIDE) * (_NOISE * clutter)
    image = (canvas[:, inner, inner] * 0.9 + 0.05 + noise).clamp(0, 1)
    return Canvases(
        image=(image * 255).round().to(torch.uint8),
        foreground=foreground,
        label=bank.label[shown],
        source=bank.source[shown],
    )


def _between(draw: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    return low + (high - low) * draw


def _digits(bank: DigitBank, shown: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Draw whole digits [B, T, T] and places for their corners [B, 2]: entirely on the canvas."""
    scale = _between(draw[:, 0], *_SCALE)
    angle = _between(draw[:, 1], -0.26, 0.26)  # +-15 degrees
    tile = _render(bank.image[shown], side=_TILE, scale=scale, angle=angle)
    tile = tile * _between(draw[:, 2], 0.7, 1.0)[:, None, None]
    reach = 4 * scale[:, None]  # half of the 8 source pixels
    centre = _between(draw[:, 3:5], reach, SIDE - reach)
    return tile, (centre - _TILE / 2).round().long()


def _fragments(bank: DigitBank, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Round cut-outs of other digits of the split [B, T, T] and their corners [B, 2], anywhere on the canvas."""
    source = (draw[:, 0] * len(bank.label)).long()
    scale = _between(draw[:, 1], *_SCALE)
    angle = _between(draw[:, 2], -math.pi, math.pi)
    about = _between(draw[:, 3:5], -0.6, 0.6)
    tile = _render(bank.image[source], side=_FRAGMENT_TILE, scale=scale, angle=angle, about=about, radius=0.55)
    tile = tile * _between(draw[:, 5], 0.3, 0.7)[:, None, None]
    corner = _between(draw[:, 6:8], -_FRAGMENT_TILE / 2, SIDE - _FRAGMENT_TILE / 2)
    return tile, corner.round().long()


def _render(
    image: Tensor,
    *,
    side: int,
    scale: Tensor,
    angle: Tensor,
    about: Tensor | None = None,
    radius: float | None = None,
) -> Tensor:
    """Tiles [M, side, side] of `image` [M, T, T]: enlarged, turned, centred at `about` ([-1, 1] spans a digit).

    With `radius`, what is further than that from the centre fades out.
    """
    step = torch.arange(side) - (side - 1) / 2
    y, x = torch.meshgrid(step, step, indexing="ij")
    zoom = (4 * scale)[:, None, None]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    grid = torch.stack(((cos * x - sin * y) / zoom, (sin * x + cos * y) / zoom), -1)
    if radius is not None:
        fade = ((radius - grid.norm(dim=-1)) * 6).clamp(0, 1)
    if about is not None:
        grid = grid + about[:, None, None, :]
    tile = F.grid_sample(image[:, None], grid, align_corners=False)[:, 0]
    return tile if radius is None else tile * fade


def _stamp(canvas: Tensor, tile: Tensor, corner: Tensor) -> None:
    """Put tile b [T, T] on canvas b at `corner[b]` (row, column), in place: the brighter of the two stays."""
    step = torch.arange(tile.shape[-1])
    at = (
        torch.arange(len(tile))[:, None, None],
        corner[:, 0, None, None] + step[:, None],
        corner[:, 1, None, None] + step,
    )
    canvas[at] = torch.maximum(canvas[at], tile)


def as_input(image: Tensor) -> Tensor:
    """A model's input: float [B, 3, H, W], standardised, for uint8 [B, H, W]."""
    return ((image.float() / 255 - MEAN) / STD)[:, None].expand(-1, 3, -1, -1)


_AT_ONCE = 1000


class CanvasSet(Dataset[Batch]):
    """Canvases 0 … count-1 of a split, drawn at first use and kept in memory (2.6 kB each) for sets like it, too.

    An example: `image` float [3, 36, 36], `label`, `source` (the digit's row in scikit-learn's set), `foreground`
    bool [36, 36] (the digit's ink). DataError without scikit-learn.
    """

    classes = tuple(str(digit) for digit in range(CLASSES))

    def __init__(self, split: Split, *, count: int, seed: int = 0) -> None:
        self.split, self.count, self.seed = split, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {name: value[0] for name, value in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> Batch:
        """These examples along axis 0."""
        drawn = self.canvases[torch.as_tensor(indices, dtype=torch.long)]
        return {
            "image": as_input(drawn.image).contiguous(),
            "label": drawn.label,
            "source": drawn.source,
            "foreground": drawn.foreground,
        }

    def prepare(self) -> None:
        """Draw the canvases now."""
        _ = self.canvases

    @functools.cached_property
    def canvases(self) -> Canvases:
        """All of them."""
        return _drawn(self.split, self.count, self.seed)


@functools.lru_cache(maxsize=2)  # a run opens its two data sets again and again
def _drawn(split: Split, count: int, seed: int) -> Canvases:
    parts = [
        canvases(split, range(first, min(first + _AT_ONCE, count)), seed=seed) for first in range(0, count, _AT_ONCE)
    ]
    names = [field.name for field in fields(Canvases)]
    return Canvases(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
