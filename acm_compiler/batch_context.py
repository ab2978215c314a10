"""`acm.batch`: what one batch tells the ACMs, its padding mask and its examples' own budgets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from acm_compiler.acm.module import Slot
from acm_compiler.budgets import setting_of
from acm_compiler.control import refuse_unfitted
from acm_compiler.conversion import conversion, sites
from acm_compiler.errors import UsageError


@contextmanager
def batch(model: nn.Module, *, mask: Tensor | None = None, budgets: Tensor | None = None) -> Iterator[None]:
    """While open, `mask` and `budgets` hold for every forward (and backward) of `model` on this thread.

    mask [batch, tokens], True (or non-zero) at real tokens: padding then counts in no loss, budget or record.
    budgets [batch]: one share of learner MACs per example, within the model's budget range.
    Raises UsageError when another `acm.batch` is open, NoBudgetTable and BudgetUnreachable as `set_budget` does.
    """
    acms = sites(model)
    if any(acm.slot is not None for acm in acms.values()):
        raise UsageError("acm.batch is already open on this model", fix="close it first; it does not nest")
    settings = {} if budgets is None else _settings(model, budgets)
    device = next(iter(acms.values())).k_lo.device
    real = None if mask is None else mask.to(device=device, dtype=torch.bool)
    try:
        for acm in acms.values():
            acm.slot = Slot(thread=threading.get_ident(), mask=real, **settings)
        yield
    finally:
        for acm in acms.values():
            acm.slot = None


def _settings(model: nn.Module, budgets: Tensor) -> dict[str, Tensor]:
    """Per-example knob and bounds for per-example budgets."""
    refuse_unfitted(model, "budgets per example")
    owner = conversion(model)
    settings = [setting_of(owner, float(budget)) for budget in budgets]
    device = next(iter(sites(model).values())).k_lo.device
    return {
        "knob": torch.tensor([s.knob for s in settings], device=device),
        "k_lo": torch.tensor([s.k_lo for s in settings], dtype=torch.int32, device=device),
    }
