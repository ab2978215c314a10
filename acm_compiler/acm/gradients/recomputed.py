"""Gradient checkpoints: a step is refused where the budget of a forward is not that of its recomputation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acm_compiler.errors import UsageError


def guard_budget(x: Tensor, acm: Any) -> Tensor:
    """`x`, the input of an ACM; within a checkpoint its gradient is refused once the ACM's budget is another.

    UsageError in backward, as a recomputation at another budget is another network, with other gradients.
    """
    if torch.compiler.is_compiling() or not x.requires_grad:
        return x
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return x
    choices = [*acm.written.values(), acm.temperature or 0.0]
    return _Choices.apply(x, torch.tensor(choices, dtype=torch.float64, device="cpu"), acm.name)


class _Choices(torch.autograd.Function):
    """Identity; a checkpoint drops the tensor that is saved here, and keeps the list."""

    @staticmethod
    def forward(ctx, x: Tensor, choices: Tensor, site: str) -> Tensor:
        ctx.save_for_backward(choices)
        ctx.choices, ctx.site = choices.tolist(), site
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor):  # type: ignore[override]
        (choices,) = ctx.saved_tensors
        if choices.tolist() != ctx.choices:
            raise UsageError(
                "the budget was changed between a checkpointed forward and its backward, which runs the forward again",
                where=ctx.site,
                fix="call backward before the next acm.set_budget, acm.set_k or acm.relax; "
                "gradients of several budgets add up",
            )
        return dx, None, None
