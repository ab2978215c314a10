"""From a site's tokens to places in time: frames of a clip, one after the other.

Shapes: B clips, R samples of the longest, S frames that the model makes of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.evaluation.ordered_tokens import ordered_tokens
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.usage import PADDING


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
