"""`acm.set_sparsity`: which values learners skip."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.intact import refuse_quantized
from acm_compiler.acm.sparse import Skips, Thresholds, ValueSizes, column_norms
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import wholly_rewritten
from acm_compiler.runtime.budgets import is_number
from acm_compiler.runtime.control import refuse_phases
from acm_compiler.runtime.sparsity.measure import quantile, refuse_no_skipping, skipping_sites

Calls = Literal["decode", "all"]
MOST = 0.6
# of the hidden values that are skipped, so many of the inputs: found on SmolLM2-135M (docs/results/smollm2.md)
_INPUTS = 0.6


@torch.no_grad()
def set_sparsity(model: nn.Module, share: float | None, *, calls: Calls = "decode") -> None:
    """Let MLP learners skip the smallest values: `share` of the MACs that the learners chosen for a token would cost.

    Budgets say how many learners run, this what of them runs; `acm.record` counts what is left. Until changed, None
    ends it; in eval mode alone. Nothing is recompiled but where it begins or ends.
    share: from 0 to 0.6, by the values that `acm.measure_sparsity` saw; 0.3 goes well with budgets of 0.5 to 0.9.
    calls: "decode", those with one token per sequence, in which the native CPU kernel saves time; "all", to see what it
    does to a metric: calls with many tokens save none.
    Raises UsageError for other values, a model whose values were not measured, split or int8 learners; LayoutUnknown
    where decode calls cannot be told apart.
    """
    found = wholly_rewritten(model, "acm.set_sparsity")
    if calls not in get_args(Calls):
        raise UsageError("calls must be one kind", found=repr(calls), expected=" | ".join(get_args(Calls)))
    if share is not None and not (is_number(share) and 0 <= share <= MOST):
        raise UsageError("a share to skip outside its range", found=repr(share), expected=f"0 to {MOST}, or None")
    if share is None:
        for acm in found.acms.values():
            acm.skips = None
        found.owner.sparsity = None
        return
    refuse_quantized(found.acms, "acm.set_sparsity")
    refuse_no_skipping(found)
    able = skipping_sites(found)
    if split := [name for name, acm in able.items() if acm.split is not None]:
        raise UsageError("split learners skip no values", where=split[0], fix="one process with all of the model")
    if missing := [name for name in able if name not in found.owner.value_sizes]:
        raise UsageError(
            "how large this model's values are has not been measured",
            where=missing[0],
            fix="acm.measure_sparsity(model, batches)",
        )
    if calls == "decode":
        refuse_phases(found)
    for name, acm in able.items():
        _skip(acm, thresholds_of(acm, found.owner.value_sizes[name], share), every_call=calls == "all")
    found.owner.sparsity = share, calls


def thresholds_of(acm: ACM, sizes: ValueSizes, share: float) -> Thresholds:
    """The sizes below which values of one site are skipped so that `share` of its MACs are."""
    weights = acm.learners.weights()
    first = acm.d_in * (1 if weights.w_up is None else 2)
    part = first / (first + weights.b_out.shape[1])
    of_hidden = share / (_INPUTS * part + 1 - part)
    norms = column_norms(weights)
    quantiles = quantile(sizes.inputs, _INPUTS * of_hidden), quantile(sizes.hidden, min(of_hidden, 1))
    # a column of zeros adds nothing, whatever it is multiplied by
    return Thresholds(*(_over(size, norm) for size, norm in zip(quantiles, norms, strict=True)))


def _over(size: float, norms: Tensor) -> Tensor:
    return torch.where(norms > 0, size / norms, torch.inf)


def _skip(acm: ACM, thresholds: Thresholds, *, every_call: bool) -> None:
    if acm.skips is None or acm.skips.every_call != every_call:
        acm.skips = Skips(thresholds, every_call=every_call)
        return
    for name, sizes in thresholds._asdict().items():
        getattr(acm.skips, name).copy_(sizes)
