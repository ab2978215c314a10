"""`acm.batch`: settings of one batch for the ACMs, its padding mask and its examples' own budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from acm_compiler.acm.context import Said, batch_held, batch_of
from acm_compiler.errors import UsageError, check_bool
from acm_compiler.passes.rewrite.conversion import Rewritten, rewritten, wholly_rewritten
from acm_compiler.runtime.budgets import setting_of
from acm_compiler.runtime.control import highest_k, refuse_unfitted
from acm_compiler.runtime.masks import unwatch_padding, watch_padding


@contextmanager
def batch(
    model: nn.Module,
    *,
    mask: Tensor | None = None,
    skip_padding: bool = False,
    budgets: Tensor | Sequence[float | str] | None = None,
) -> Iterator[None]:
    """While open, `mask` and `budgets` hold for every forward (and backward) of `model` in this thread or task.

    Other threads and asyncio tasks do not see them, so that many may serve one model at once; tasks started inside and
    `asyncio.to_thread` do, as with every context variable.
    mask [batch, tokens], True (or non-zero) at real tokens: padding then counts in no loss, budget or record.
    skip_padding: whether padding runs no learner at all, which saves its time and changes what the sites make of it:
    for models whose other outputs do not depend on that, such as encoders that are given the mask, too.
    budgets [batch]: one budget per example, in the spellings of `set_budget`, within the model's budget range.
    They overrule a k fixed by `set_k`; a `cap` set by `set_budget` holds for them too.
    Raises UsageError when another `acm.batch` is open here; for budgets also what `set_budget` does, such as
    BudgetUnreachable. The call itself raises LayoutUnknown where either does not fit a site's tokens.
    """
    found = rewritten(model)
    owner, device = found.owner, next(iter(found.acms.values())).k_lo.device
    if batch_of(owner) is not None:
        raise UsageError("acm.batch is already open on this model", fix="close it first; it does not nest")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        given = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError("mask must be a tensor [batch, tokens]", found=given)
    if mask is not None and mask.is_floating_point() and bool((mask < 0).any()):
        fix = "acm.batch(model, mask=mask == 0): what is added to scores is 0 where a token is real"
        raise UsageError("mask must be 0 at padding, and more at real tokens", found="numbers below 0", fix=fix)
    check_bool(skip_padding, "skip_padding")
    if skip_padding and mask is None:
        raise UsageError("skip_padding needs a mask, which says what padding is", fix="acm.batch(model, mask=mask, …)")
    said = {} if budgets is None else _settings(model, budgets)
    if mask is not None:
        said["mask"] = mask.bool()
    tensors = {name: tensor.to(device) for name, tensor in said.items()}
    layouts = [acm.layout for acm in found.acms.values()]
    # of calls of all sites one that has an axis of examples refuses another number of them
    each = any(at is not None and at.batch_axis is not None and at.folds == 1 for at in layouts)
    with batch_held(owner, Said(**tensors, skip_padding=skip_padding, each=each)):
        yield


@contextmanager
def padding_watched(found: Rewritten) -> Iterator[None]:
    """While open, its ACMs read the padding masks of the model's own calls, where `acm.batch` gives none."""
    before = found.owner.padding
    if before is None:
        found.owner.padding = watch_padding(found.model)
    try:
        yield
    finally:
        if before is None:
            unwatch_padding(found.model)
            found.owner.padding = None


def _settings(model: nn.Module, budgets: Tensor | Sequence[float | str]) -> dict[str, Tensor]:
    """Per-example knob and lowest k, and the highest k of sites, which the model's cap alone bounds."""
    each = budgets.tolist() if isinstance(budgets, Tensor) else budgets
    if isinstance(each, str) or not isinstance(each, Sequence):
        raise UsageError(
            "budgets of a batch must be one per example",
            found=repr(each),
            expected="a tensor or list [batch]",
            fix="one budget for all of them: acm.set_budget(model, 0.4)",
        )
    found = wholly_rewritten(model, "a budget")
    refuse_unfitted(found, "budgets per example")
    owner = found.owner
    settings = [setting_of(owner, budget) for budget in each]
    most = max(site.learners for site in owner.plan.sites)
    k_lo, most_k = [s.k_lo for s in settings], [highest_k(count, owner.cap) for count in range(most + 1)]
    return {
        "knob": torch.tensor([s.knob for s in settings], dtype=torch.float32, device="cpu"),
        "k_lo": torch.tensor(k_lo, dtype=torch.int32, device="cpu"),
        "most": torch.tensor(most_k, dtype=torch.int32, device="cpu"),
    }
