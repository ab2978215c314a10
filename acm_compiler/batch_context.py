"""`acm.batch`: what one batch tells the ACMs, its padding mask and its examples' own budgets."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.module import Slot
from acm_compiler.budgets import setting_of
from acm_compiler.control import highest_k, refuse_unfitted
from acm_compiler.conversion import conversion, sites, whole_conversion
from acm_compiler.errors import UsageError


@contextmanager
def batch(
    model: nn.Module, *, mask: Tensor | None = None, budgets: Tensor | Sequence[float | str] | None = None
) -> Iterator[None]:
    """While open, `mask` and `budgets` hold for every forward (and backward) of `model` on this thread.

    mask [batch, tokens], True (or non-zero) at real tokens: padding then counts in no loss, budget or record.
    budgets [batch]: one budget per example, in the spellings of `set_budget`, within the model's budget range.
    They overrule a k fixed by `set_k`; a `cap` set by `set_budget` holds for them too.
    Raises UsageError when another `acm.batch` is open; for budgets also what `set_budget` does, such as
    BudgetUnreachable.
    """
    acms = sites(model)
    if any(acm.slot is not None for acm in acms.values()):
        raise UsageError("acm.batch is already open on this model", fix="close it first; it does not nest")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError("a padding mask of another kind", found=found, expected="a tensor [batch, tokens]")
    said = {} if budgets is None else _settings(model, budgets)
    if mask is not None:
        said["mask"] = mask.bool()
    # a model may lie on several devices
    there = {
        device: {name: tensor.to(device) for name, tensor in said.items()}
        for device in {acm.k_lo.device for acm in acms.values()}
    }
    with ExitStack() as undo:
        if budgets is not None:
            undo.enter_context(_bounded_by(acms.values(), conversion(model).cap))
        try:
            for acm in acms.values():
                acm.slot = Slot(thread=threading.get_ident(), **there[acm.k_lo.device])
            yield
        finally:
            for acm in acms.values():
                acm.slot = None


@contextmanager
def _bounded_by(acms: Iterable[ACM], cap: float | None) -> Iterator[None]:
    """While open, `cap` alone bounds k from above, as no k is fixed; what is set inside stays.

    The bound is written where a graph reads it anyway, so that examples' own budgets cost it nothing.
    """
    changed: list[tuple[ACM, dict[str, int], dict[str, int]]] = []
    try:
        for acm in acms:
            before, bounds = acm.written, dict.fromkeys(("k_hi", "decode_k_hi"), acm.within(0, highest_k(acm, cap))[1])
            if before != before | bounds:
                acm.set_run_time(bounds)
                changed.append((acm, before, acm.written))
        yield
    finally:
        for acm, before, ours in changed:
            if acm.written == ours:
                acm.set_run_time(before)


def _settings(model: nn.Module, budgets: Tensor | Sequence[float | str]) -> dict[str, Tensor]:
    """Per-example knob and bounds for per-example budgets."""
    each = budgets.tolist() if isinstance(budgets, Tensor) else budgets
    if isinstance(each, str) or not isinstance(each, Sequence):
        raise UsageError(
            "budgets of a batch are one per example",
            found=repr(each),
            expected="a tensor or list [batch]",
            fix="one budget for all of them: acm.set_budget(model, 0.4)",
        )
    refuse_unfitted(model, "budgets per example")
    owner = whole_conversion(model, "a budget")
    settings = [setting_of(owner, budget) for budget in each]
    return {
        "knob": torch.tensor([s.knob for s in settings]),
        "k_lo": torch.tensor([s.k_lo for s in settings], dtype=torch.int32),
    }
