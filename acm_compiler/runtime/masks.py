"""Padding: the mask that a call carries, from audio samples to frames, at every site.

Shapes: B examples, R places of what the model is given (tokens, or samples of audio).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM, tokens
from acm_compiler.sources.inputs import by_name

_TORCHS = ("src_key_padding_mask", "key_padding_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMask:
    """`real_BR`: bool, True at what is no padding. `heard`: what the mask speaks of."""

    model: nn.Module
    real_BR: Tensor
    heard: Tensor

    @property
    def is_of_audio(self) -> bool:
        """True if the mask is one of audio samples [B, R]."""
        return self.heard.is_floating_point() and self.heard.shape == self.real_BR.shape

    def tokens(self) -> Tensor:
        """bool [B, tokens]: the mask, of audio that of its frames."""
        return frame_mask(self.model, self.heard, self.real_BR)

    def new_tokens(self) -> Tensor:
        """`tokens` without those of the cache, which the mask covers too: the sites see the last ones."""
        return frame_mask(self.model, self.heard, self.real_BR[:, -self.heard.shape[1] :])


def call_mask(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallMask | None:
    """The padding mask [B, R] of a call, given by name or by its place; None where there is none.

    That is its `attention_mask`, of one row per query those tokens that any query attends to, or else, in torch's
    sense, its `src_key_padding_mask` or `key_padding_mask`.
    """
    args, kwargs = by_name(model, args, kwargs)
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 3, 4):
        real_BR = _outside_key_padding(kwargs)
        return None if real_BR is None else CallMask(model=model, real_BR=real_BR, heard=real_BR)
    named = (value for name, value in kwargs.items() if not name.startswith("decoder_") and value is not mask)
    heard = next((value for value in (*args, *named) if isinstance(value, Tensor)), mask)
    return CallMask(model=model, real_BR=mask.bool() if mask.dim() == 2 else _attended(mask), heard=heard)


def _attended(mask: Tensor) -> Tensor:
    """bool [B, R]: the keys of a mask [B, queries, R] or [B, heads, queries, R] that any query attends to.

    A mask of floating point is added to the scores: its padding is minus infinity, or its type's lowest number.
    """
    attended = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
    return attended.flatten(1, -2).any(1)


def _outside_key_padding(named: Mapping[str, Any]) -> Tensor | None:
    """Mask [B, R] of real tokens from torch's own padding mask, which is True, or minus infinity, at padding.

    None beside a target of the same shape: what fits the one's tokens would be taken for the other's too.
    """
    masks = (named.get(name) for name in _TORCHS)
    mask = next((value for value in masks if isinstance(value, Tensor) and value.dim() == 2), None)
    target = named.get("tgt")
    if mask is None or (isinstance(target, Tensor) and set(mask.shape) == set(target.shape[:2])):
        return None
    if mask.is_floating_point():
        return ~mask.isneginf()
    return ~mask if mask.dtype == torch.bool else None


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


def fits(acm: ACM, shape: torch.Size, mask_BS: Tensor) -> bool:
    """True if `mask_BS` masks the tokens of an input [*shape, D] of this site."""
    layout = acm.layout
    if layout is None or layout.folds != 1:
        return False
    if layout.batch_axis is None:
        return mask_BS.shape == (1, shape.numel())
    if layout.batch_axis >= len(shape):
        return False
    batch = shape[layout.batch_axis]
    return batch > 0 and mask_BS.shape == (batch, shape.numel() // batch)


def real_tokens(acm: ACM, x: Tensor, mask_BS: Tensor | None) -> Tensor | None:
    """True at the real tokens of `x` [..., D], flat [T]; None: all are.

    A mask given by `acm.batch` must fit. That of the call, `mask_BS`, need not: it may speak of the other half
    of an encoder-decoder; then all tokens count here.
    """
    given_T = acm.mask_of(x.shape[:-1])
    if given_T is not None or mask_BS is None or not fits(acm, x.shape[:-1], mask_BS):
        return given_T
    return tokens.of_mask(mask_BS.to(x.device), x.shape[:-1], acm.layout, site=acm.name)
