"""From a site's tokens to places in a picture.

Told by numbers alone: a square picture cut into a square of patches, row by row, after at most a few tokens that
stand for no place (class, distillation, registers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from acm_compiler.evaluation.ordered_tokens import ordered_tokens
from acm_compiler.planning.plan import Plan

_MOST_EXTRA = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`side` x `side` patches, after `extra` tokens without a place."""

    extra: int
    side: int


def grid_of(tokens: int, height: int, width: int) -> Grid | None:
    """How `tokens` tokens lie in a picture; None where that cannot be told."""
    side = math.isqrt(tokens)
    extra = tokens - side * side
    if side < 2 or height != width or height % side or extra > _MOST_EXTRA:
        return None
    return Grid(extra=extra, side=side)


def patch_k(k: dict[str, Tensor], plan: Plan, height: int, width: int) -> dict[str, Tensor]:
    """k of the patches of those sites whose tokens lie in the picture: float [B, side, side] by site name.

    k: as `acm.record` gives it, [B, calls * tokens]; repeated calls are averaged.
    """
    found = {}
    for name, k_BCT in ordered_tokens(k, plan):
        grid = grid_of(k_BCT.shape[2], height, width)
        if grid is not None:
            k_BT = k_BCT.float().mean(1)
            found[name] = k_BT[:, grid.extra :].unflatten(1, (grid.side, grid.side))
    return found


def patch_foreground(mask_BHW: Tensor, side: int) -> Tensor:
    """bool [B, side, side]: the patches that hold any foreground pixel."""
    patch = mask_BHW.shape[-1] // side
    return F.max_pool2d(mask_BHW[:, None].float(), patch, stride=patch)[:, 0] > 0
