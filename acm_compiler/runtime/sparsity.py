"""Small values that learners skip, a token at a time: how large values are, and which are skipped.

docs/semantics.md, Skipped values, has the equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.context import called, observed
from acm_compiler.acm.intact import refuse_quantized, refuse_skips
from acm_compiler.acm.reference import hidden
from acm_compiler.acm.sparse import Skips, Thresholds, ValueSizes, column_norms
from acm_compiler.acm.tokens import keeps_order
from acm_compiler.data.batch import check_tokens, refuse_no_batches
from acm_compiler.errors import DataError, UsageError
from acm_compiler.passes.capture.forward import output_of
from acm_compiler.passes.rewrite.conversion import Rewritten, refuse_compiled, wholly_rewritten
from acm_compiler.runtime.budgets import is_number
from acm_compiler.runtime.control import refuse_phases, refuse_unfitted
from acm_compiler.runtime.masks import CallPadding
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.sources.inputs import Inputs

STEPS = 64
"""Equal steps of the quantiles that are kept."""
_DRAWN = 2**18  # values of a kind that a site's quantiles are taken of, at most


def measure_sparsity(model: nn.Module, batches: Iterable[Inputs], *, tokens: int = 2_048) -> None:
    """Measure how large inputs and hidden values of a rewritten model's MLP learners are, for `acm.set_sparsity`.

    batches: an iterable of what the model takes (tensor, tuple, or dict), read until every site has seen `tokens` real
    tokens. At the budget or k that is set now; a half that most tokens will run at is a good one. The result is kept by
    the model and in folders that it is saved to. `acm.calibrate` does this for models that generate.
    Raises UsageError where no site is an MLP of floats with one second layer, and for a batch that the model does not
    take, DataError without real tokens, SitesNotFitted, CompiledModelError.
    """
    refuse_compiled(model, "measured")
    found = wholly_rewritten(model, "acm.measure_sparsity")
    refuse_quantized(found.acms, "acm.measure_sparsity")
    refuse_unfitted(found, "acm.measure_sparsity")
    refuse_no_skipping(found)
    refuse_skips(found.acms, "acm.measure_sparsity")
    refuse_no_batches(batches)
    check_tokens(tokens)
    measure_sizes(found, batches, tokens=tokens, run=lambda inputs: output_of(model, inputs))


def measure_sizes(found: Rewritten, examples: Iterable[Any], *, tokens: int, run: Callable[[Any], Any]) -> None:
    """The same for a model whose ACMs are known; `run` runs it on one of the examples."""
    drawn = {name: _Drawn(acm, tokens) for name, acm in skipping_sites(found).items()}
    padding = CallPadding(found.model)

    def see(acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
        if mask_BS is None and keeps_order(acm.layout, x.shape[:-1]):
            mask_BS = padding.mask_of(k_BS.shape)
        if acm.name in drawn:
            drawn[acm.name].add(k_BS, mask_BS, x)

    handles: list[Any] = []
    with undisturbed(found), observed(found.owner, see) as here, called(found.owner, padding.examples):
        try:
            handles += padding.watch(lambda hook: lambda *args: hook(*args) if here() else None)
            for example in examples:
                run(example)
                if min(site.seen for site in drawn.values()) >= tokens:
                    break
        finally:
            for handle in handles:
                handle.remove()
    if idle := [name for name, site in drawn.items() if not site.seen]:
        raise DataError("no real token reached this site", where=idle[0], fix="give batches that are not empty")
    found.owner.value_sizes = {name: site.sizes() for name, site in drawn.items()}


def skipping_sites(found: Rewritten) -> dict[str, ACM]:
    """The sites that can skip values, by name: MLPs whose second layer all k share."""
    return {
        name: acm
        for name, acm in found.acms.items()
        if acm.learners.form in ("mlp", "gated") and (w_out := acm.learners.w_out) is not None and w_out.dim() == 3
    }


def refuse_no_skipping(found: Rewritten) -> None:
    """UsageError where no site can skip values."""
    if not skipping_sites(found):
        raise UsageError(
            "no site of this model can skip values",
            found=", ".join(sorted({f"{site.kind}, second_layer {site.second_layer}" for site in found.plan.sites})),
            expected="MLPs whose second layer all k share, or all but k = N",
        )


class _Drawn:
    """Sizes of the values of one site's real tokens, a bounded number of them, drawn evenly."""

    def __init__(self, acm: ACM, tokens: int) -> None:
        weights = acm.learners.weights()
        self.acm, self.weights, self.seen = acm, weights, 0
        self.norm_D, self.norm_NH = column_norms(weights)
        self.parts: list[tuple[Tensor, Tensor]] = []
        values = tokens * weights.w_in.shape[0] * weights.w_in.shape[1]
        self.every = 1 + values // _DRAWN

    def add(self, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
        """Those of one call."""
        x_BSD = self.acm.by_example(x.reshape(-1, x.shape[-1]), x.shape[:-1])
        real_BS = k_BS > 0 if mask_BS is None else (k_BS > 0) & mask_BS.to(k_BS.device)
        self.seen += int(k_BS.numel() if mask_BS is None else mask_BS.sum())
        x_TD, k_T = x_BSD[real_BS][:: self.every], k_BS[real_BS][:: self.every]
        n, width = self.weights.w_in.shape[:2]
        h_TNH = hidden(x_TD, self.weights, n).unflatten(-1, (n, width))
        runs_TN = torch.arange(n, device=k_T.device) < k_T[:, None]
        inputs, hidden_values = x_TD.abs() * self.norm_D, (h_TNH.abs() * self.norm_NH)[runs_TN]
        self.parts.append((inputs.flatten(), hidden_values))

    def sizes(self) -> ValueSizes:
        """Their quantiles."""
        return ValueSizes(*(quantiles_of(torch.cat(kind)) for kind in zip(*self.parts, strict=True)))


def quantiles_of(values: Tensor, steps: int = STEPS) -> tuple[float, ...]:
    """Quantiles of the values in equal steps from 0 to 1, zeros where there are none."""
    if not values.numel():
        return (0.0,) * (steps + 1)
    ordered = np.sort(values.detach().flatten().float().cpu().numpy())  # torch's sort takes several times as long
    places = torch.linspace(0, len(ordered) - 1, steps + 1, dtype=torch.float64, device="cpu").round().long()
    return tuple(float(f"{size:.5g}") for size in ordered[places.numpy()].tolist())


def quantile(quantiles: tuple[float, ...], share: float) -> float:
    """The value below which `share` of them lie, linear between the steps."""
    at = share * (len(quantiles) - 1)
    low = min(int(at), len(quantiles) - 2)
    return quantiles[low] + (at - low) * (quantiles[low + 1] - quantiles[low])


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
        raise UsageError(f"a share to skip must be from 0 to {MOST}, or None", found=repr(share))
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
    pairs = zip(quantiles, norms, strict=True)
    return Thresholds(*(torch.where(norm > 0, size / norm, torch.inf) for size, norm in pairs))


def _skip(acm: ACM, thresholds: Thresholds, *, every_call: bool) -> None:
    if acm.skips is None or acm.skips.every_call != every_call:
        acm.skips = Skips(thresholds, every_call=every_call)
        return
    for name, sizes in thresholds._asdict().items():
        getattr(acm.skips, name).copy_(sizes)
