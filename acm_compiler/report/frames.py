"""From a site's tokens to places in time: frames of a clip, one after the other.

Shapes: B clips, R samples of the longest, S frames that the model makes of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.plans import Plan
from acm_compiler.usage import PADDING


def frame_k(k: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """k of the frames of those sites whose tokens follow each other in time: float [B, S] by site name, nan at padding.

    k: as `acm.record` gives it, [B, calls * tokens]; repeated calls are averaged.
    """
    found = {}
    for name, k_BS in k.items():
        site = plan.site(name)
        if site.layout is None or site.layout.folds != 1 or k_BS.shape[1] % site.calls:
            continue
        real = torch.where(k_BS == PADDING, torch.nan, k_BS.float())
        found[name] = real.unflatten(1, (site.calls, -1)).mean(1)
    return found


def frame_foreground(mask_BR: Tensor, frames: int) -> Tensor:
    """bool [B, S]: the frames at least half of whose stretch of the clip is foreground."""
    return F.adaptive_avg_pool1d(mask_BR[:, None].float(), frames)[:, 0] >= 0.5
