"""The padding mask that a call of a model carries.

Shapes: B examples, R places of what the model is given (tokens, or samples of audio).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from acm_compiler.audio_frames import frame_mask
from acm_compiler.inputs import by_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMask:
    """`real_BR`: bool, True at what is no padding. `heard`: what the mask speaks of."""

    model: nn.Module
    real_BR: Tensor
    heard: Tensor

    def tokens(self) -> Tensor:
        """bool [B, tokens]: the mask, of audio that of its frames."""
        return frame_mask(self.model, self.heard, self.real_BR)

    def new_tokens(self) -> Tensor:
        """`tokens` without those of the cache, which the mask covers too: the sites see the last ones."""
        return frame_mask(self.model, self.heard, self.real_BR[:, -self.heard.shape[1] :])


def call_mask(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallMask | None:
    """The `attention_mask` [B, R] of a call, given by name or by its place; None where there is none."""
    args, kwargs = by_name(model, args, kwargs)
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    named = (value for name, value in kwargs.items() if not name.startswith("decoder_") and value is not mask)
    heard = next((value for value in (*args, *named) if isinstance(value, Tensor)), mask)
    return CallMask(model=model, real_BR=mask.bool(), heard=heard)
