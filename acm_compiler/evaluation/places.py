"""Places of tokens: the frames of a clip, or the patches of an image, and those that hold the foreground.

A square image cut into a square of patches, row by row, after at most a few tokens that stand for no place (class,
distillation, registers), is recognised by its numbers.
Shapes: B examples, S frames of one, R samples of a clip, H and W of an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.usage import PADDING

_MOST_EXTRA = 8  # tokens without a place


def ordered_tokens(k: Mapping[str, Tensor], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Each such site's name and k by call, [B, calls, tokens]; k: as `acm.record` gives it, [B, calls * tokens]."""
    for name, k_BS in k.items():
        site = plan.site(name)
        # windows and beams come in an order of their own
        if site.layout is not None and site.layout.folds == 1 and k_BS.shape[1] % site.calls == 0:
            yield name, k_BS.unflatten(1, (site.calls, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`side` x `side` patches, after `extra` tokens without a place."""

    extra: int
    side: int


def grid_of(tokens: int, height: int, width: int) -> Grid | None:
    """Grid of `tokens` tokens in an image; None where it is not known."""
    side = math.isqrt(tokens)
    extra = tokens - side * side
    if side < 2 or height != width or height % side or extra > _MOST_EXTRA:
        return None
    return Grid(extra=extra, side=side)


def patch_k(k: dict[str, Tensor], plan: Plan, height: int, width: int) -> dict[str, Tensor]:
    """k of the patches of those sites whose tokens lie in the image: float [B, side, side] by site name.

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


def frame_k(k: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """k of the frames of those sites whose tokens follow each other in time: float [B, S] by site name, nan at padding.

    k: as `acm.record` gives it, [B, calls * tokens]; repeated calls are averaged.
    """
    return {
        name: torch.where(k_BCS == PADDING, torch.nan, k_BCS.float()).mean(1) for name, k_BCS in ordered_tokens(k, plan)
    }


def frame_foreground(mask_BR: Tensor, frames: int) -> Tensor:
    """bool [B, S]: the frames at least half of whose stretch of the clip is foreground."""
    return F.adaptive_avg_pool1d(mask_BR[:, None].float(), frames)[:, 0] >= 0.5
