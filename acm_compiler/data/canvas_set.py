"""Cluttered digits as a data set."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from acm_compiler.data.batch import Batch
from acm_compiler.data.digits import CLASSES, Canvases, Split, as_input, canvases

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

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return Canvases(
        image=joined("image"),
        foreground=joined("foreground"),
        label=joined("label"),
        source=joined("source"),
    )
