"""Between the batch of a model and the tokens of a site, by the site's layout."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from acm_compiler.acm.context import batch_of, examples_of
from acm_compiler.errors import LayoutUnknown
from acm_compiler.site import Layout


def fitted(layout: Layout | None, shape: torch.Size, owner: object) -> Layout | None:
    """`layout` for an input [*shape, D] in the running call of the model with that conversion.

    Tokens that lie along the batch are as many as the call's examples have, where it tells how many there are, and else
    as many as the plan's example had.
    """
    if layout is None or layout.batch_axis is None or layout.is_packed or (layout.folds == 1 and len(shape) > 1):
        return layout
    batch, size = examples_of(owner), shape[layout.batch_axis]
    return layout if not batch or not size or size % batch else dataclasses.replace(layout, folds=size // batch)


def keeps_order(layout: Layout | None, shape: torch.Size) -> bool:
    """True if an input [*shape, D] has the tokens of each example in the order of a mask [batch, tokens].

    So it has where the batch is an axis of its own, and where batch and tokens are one axis; windows and packed tokens
    have not.
    """
    return layout is not None and (layout.folds == 1 or (layout.folds > 1 and len(shape) == 1))


def size_of_mask(shape: torch.Size, layout: Layout | None) -> torch.Size | None:
    """The shape [batch, tokens] of a mask for an input [*shape, D]; None where none can be followed into its tokens."""
    if layout is None or not keeps_order(layout, shape):
        return None
    if layout.batch_axis is None:
        return torch.Size((1, shape.numel()))
    if layout.batch_axis >= len(shape) or shape[layout.batch_axis] % layout.folds:
        return None
    batch = shape[layout.batch_axis] // layout.folds
    return torch.Size((batch, shape.numel() // batch)) if batch else None


def to_batch(values_T: Tensor, shape: torch.Size, layout: Layout | None, *, site: str) -> Tensor:
    """`values_T` (one entry, or one row, per token of an input [*shape, D]) as [batch, tokens, ...].

    Tokens that cannot be told apart by example are those of one.
    """
    layout = _known(layout, site)
    if layout.batch_axis is None or layout.is_packed:
        return values_T.unsqueeze(0)
    batch = _batch(shape, layout, site)
    values = values_T.unflatten(0, shape) if values_T.shape[0] else values_T.reshape(*shape, *values_T.shape[1:])
    values = values.movedim(layout.batch_axis, 0)
    tokens = shape.numel() // batch if batch else 0
    return values.reshape(batch, tokens, *values_T.shape[1:])


def count_k(k_T: Tensor, mask_T: Tensor | None, most: int) -> Tensor:
    """Numbers of tokens whose k is 0, 1, ..., `most`, int64 [most + 1]; what the mask leaves out counts nowhere."""
    if not torch.compiler.is_compiling():
        return torch.bincount(k_T if mask_T is None else k_T[mask_T], minlength=most + 1)
    # in graphs sizes must not depend on values, as bincount's do; no choice is -1
    k_1T = (k_T if mask_T is None else torch.where(mask_T, k_T, -1))[None]
    return (torch.arange(most + 1, device=k_T.device)[:, None] == k_1T).sum(1)


def skip(k_T: Tensor, mask_T: Tensor | None) -> Tensor:
    """k of every token, 0 where the mask is False."""
    return k_T if mask_T is None else torch.where(mask_T, k_T, 0)


NO_AXIS = -1


def axis_of_ones(layout: Layout | None) -> int | None:
    """The one axis along which inputs of one token of every example may be longer than 1, or NO_AXIS.

    None where such inputs cannot be told.
    """
    if layout is None or layout.folds > 1:
        return None
    return NO_AXIS if layout.is_pooled else layout.batch_axis


def is_one_each(shape: torch.Size, axis: int | None) -> bool:
    """True if an input [*shape, D] holds one token of every example, as when a decoder goes on from its cache.

    axis: `axis_of_ones` of the site's layout.
    """
    return axis is not None and all(size == 1 for at, size in enumerate(shape) if at != axis)


def of_examples(values_B: Tensor, shape: torch.Size, layout: Layout | None, *, site: str) -> Tensor:
    """Per-example values [batch] spread over the tokens of an input [*shape, D], as [T]."""
    layout = _check_examples(values_B, shape, layout, site)
    if layout.batch_axis is None:
        return values_B.expand(shape.numel())
    folded = values_B.repeat_interleave(layout.folds) if layout.folds > 1 else values_B
    view = [1] * len(shape)
    view[layout.batch_axis] = -1
    return folded.view(view).expand(shape).reshape(-1)


def examples(shape: torch.Size, layout: Layout | None, *, site: str) -> Tensor:
    """The number, from 0, of the example to which each token of an input [*shape, D] belongs, as [T].

    0 for all where they cannot be told apart.
    """
    layout = _known(layout, site)
    if layout.is_pooled:
        return torch.zeros(shape.numel(), dtype=torch.int64)
    return of_examples(torch.arange(_batch(shape, layout, site), device="cpu"), shape, layout, site=site)


def known_mask(owner: object, shape: torch.Size, layout: Layout | None) -> Tensor | None:
    """The mask [batch, tokens] of an open `acm.batch` for the model with that conversion.

    Without one, where calls of the model are followed, the running call's own, if it fits an input [*shape, D].
    """
    said = batch_of(owner)
    if said is not None and said.mask is not None:
        return said.mask
    padding, size = getattr(owner, "padding", None), size_of_mask(shape, layout)
    return None if padding is None or size is None else padding.mask_of(size)


def of_mask(mask_BS: Tensor, shape: torch.Size, layout: Layout | None, *, site: str) -> Tensor:
    """A mask [batch, tokens], True at real tokens, in the order of the tokens of an input [*shape, D], as [T]."""
    layout, others = _check_mask(mask_BS, shape, layout, site)
    if layout.batch_axis is None or layout.folds != 1:
        return mask_BS.reshape(-1)
    return mask_BS.reshape(mask_BS.shape[0], *others).movedim(0, layout.batch_axis).reshape(-1)


def check_fit(
    mask_BS: Tensor | None, values_B: Tensor | None, shape: torch.Size, layout: Layout | None, *, site: str
) -> None:
    """LayoutUnknown where a mask, or values of examples, cannot be spread over the tokens of an input [*shape, D]."""
    if mask_BS is not None:
        _check_mask(mask_BS, shape, layout, site)
    if values_B is not None:
        _check_examples(values_B, shape, layout, site)


def _check_examples(values_B: Tensor, shape: torch.Size, layout: Layout | None, site: str) -> Layout:
    layout = _known(layout, site)
    _check(values_B.shape[0], _batch(shape, layout, site), "examples with a budget", site)
    return layout


def _check_mask(mask_BS: Tensor, shape: torch.Size, layout: Layout | None, site: str) -> tuple[Layout, torch.Size]:
    """The layout, and the sizes of the axes but that of the batch."""
    layout = _known(layout, site)
    if not keeps_order(layout, shape):
        raise LayoutUnknown(
            "a token mask cannot be followed into folded or packed tokens (windows, beams, patches of images)",
            where=site,
            fix="leave mask= out: sites read the attention_mask among the call's own arguments where it fits",
        )
    others = torch.Size(size for axis, size in enumerate(shape) if axis != layout.batch_axis)
    _check(mask_BS.shape[0], _batch(shape, layout, site), "examples in the mask", site)
    _check(mask_BS.shape[1], others.numel() * layout.folds, "tokens in the mask", site)
    return layout, others


def _batch(shape: torch.Size, layout: Layout, site: str) -> int:
    """The number of examples in an input [*shape, D]; LayoutUnknown where it is none of the planned length."""
    if layout.batch_axis is None:
        return 1
    if layout.is_packed:
        raise LayoutUnknown(
            "the tokens of all examples are packed into one axis here, and whose they are is not known",
            where=site,
            fix="give a call examples of the same budget alone, by acm.set_budget(model, budget); or exclude the site",
        )
    if shape[layout.batch_axis] % layout.folds:
        raise LayoutUnknown(
            "the tokens of an example lie along the batch here, and their number was another one when it was planned",
            where=site,
            found=f"{shape[layout.batch_axis]} along axis {layout.batch_axis}",
            expected=f"a multiple of {layout.folds}",
            fix="say how many there are: acm.batch(model, mask=mask), of ones where all are real; "
            "or give inputs of the length of the example inputs, padded to it",
        )
    return shape[layout.batch_axis] // layout.folds


def _known(layout: Layout | None, site: str) -> Layout:
    if layout is None:
        raise LayoutUnknown(
            "which tokens belong to which example of the batch is not known at this site",
            where=site,
            fix="plan with one example, then give batches of one; or plan with example inputs the first of which has "
            "the batch as its first axis; or exclude the site",
        )
    return layout


def _check(found: int, expected: int, what: str, site: str) -> None:
    if found != expected:
        raise LayoutUnknown(
            f"the number of {what} does not fit this call",
            where=site,
            found=found,
            expected=expected,
            fix="give a mask [batch, tokens], or budgets [batch], of the same examples and tokens as this call; of "
            "beams and num_return_sequences each row counts (docs/speech-and-text.md)",
        )
