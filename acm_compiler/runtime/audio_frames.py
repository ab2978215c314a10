"""From samples of audio to the frames that a model of transformers makes of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def frame_mask(model: nn.Module, heard: Tensor | None, mask_BR: Tensor) -> Tensor:
    """bool [B, S]: the frames made of real samples, as the model itself counts them.

    heard: what `mask_BR` [B, R] speaks of. Where that is no audio [B, R], or the model does not say how it makes
    frames, the mask as it is.
    """
    mask_BR = mask_BR.bool()
    if heard is None or not heard.is_floating_point() or heard.shape != mask_BR.shape:
        return mask_BR
    ways = (getattr(module, "_get_feat_extract_output_lengths", None) for module in model.modules())
    frames = next((way for way in ways if way is not None), None)
    if frames is None:
        return mask_BR
    lengths_B = frames(mask_BR.sum(1))
    places_S = torch.arange(int(frames(torch.tensor(mask_BR.shape[1]))), device=mask_BR.device)
    return places_S < lengths_B[:, None]
