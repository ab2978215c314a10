"""Which tokens of a batch are real, at every site."""

from __future__ import annotations

import torch
from torch import Tensor

from acm_compiler.acm import ACM, tokens


def fits(acm: ACM, shape: torch.Size, mask_BS: Tensor) -> bool:
    """Whether `mask_BS` speaks of the tokens of an input [*shape, D] of this site."""
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
