"""`acm::sparse_learners`: MLP learners that skip small values (docs/semantics.md, Skipped values).

A value that counts as zero needs no column of the weights that it is multiplied by. For a token at a time, as when a
decoder writes text, that is time saved: kernels take few tokens, more go by the reference, which saves none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.acm.arguments import LearnersArguments, Weights, require_range, schema
from acm_compiler.acm.check_arguments import may_equal, require_learners, require_thresholds
from acm_compiler.acm.ops import FORM, cast_weights, define, map_tokens
from acm_compiler.acm.precision import autocast_type, without_autocast
from acm_compiler.acm.reference import hidden


class Thresholds(NamedTuple):
    """The sizes below which values are skipped: inputs [D] and hidden values [N, H], float32."""

    inputs: Tensor
    hidden: Tensor


class SparseArguments(NamedTuple):
    """`acm::sparse_learners`: x [T, D], k [T], what `Thresholds` holds, and the weights of learners that are floats."""

    x: Tensor
    k: Tensor
    thresholds_in: Tensor
    thresholds_hidden: Tensor
    w_in: Tensor
    b_in: Tensor | None
    w_up: Tensor | None
    b_up: Tensor | None
    w_out: Tensor
    b_out: Tensor
    w_top: Tensor | None


_FLOATS = 7  # so many of the tensors in `Weights` do float learners have


def sparse_learners(x_TD: Tensor, k_T: Tensor, weights: Weights, thresholds: Thresholds) -> Tensor:
    """`sparse_output`, [T, O]: one operator wherever no gradient is asked for."""
    dtype = autocast_type(x_TD.device)
    if dtype is not None:
        with without_autocast(x_TD.device):
            return sparse_learners(x_TD.to(dtype), k_T, cast_weights(weights, dtype), thresholds)
    tensors = weights.tensors[:_FLOATS]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TD, *tensors)):
        return sparse_output(x_TD, k_T, weights, thresholds)
    return SPARSE(x_TD, k_T, *thresholds, *tensors, form=weights.form, act=weights.act)


def sparse_output(x_TD: Tensor, k_T: Tensor, weights: Weights, thresholds: Thresholds) -> Tensor:
    """y_{k(t)} of learners that skip small values, [T, O]; all learners are computed, and what k leaves out is zero."""
    n, width = weights.w_in.shape[:2]
    h_TNH = kept_hidden(x_TD, weights, thresholds).unflatten(-1, (n, width))
    runs_TN1 = (torch.arange(n, device=k_T.device) < k_T[:, None])[..., None]
    assert weights.w_out is not None
    y_TO = F.linear(torch.where(runs_TN1, h_TNH, 0).flatten(1), weights.w_out.flatten(1)) + weights.b_out[k_T]
    if weights.w_top is None:
        return y_TO
    return torch.where(k_T[:, None] == n, F.linear(h_TNH.flatten(1), weights.w_top, weights.b_out[-1]), y_TO)


def kept_hidden(x_TD: Tensor, weights: Weights, thresholds: Thresholds) -> Tensor:
    """Hidden values of all learners, [T, N * H], of inputs that were cut, cut themselves."""
    return cut(hidden(cut(x_TD, thresholds.inputs), weights, weights.learners), thresholds.hidden.flatten())


def cut(values: Tensor, thresholds: Tensor) -> Tensor:
    """The values, 0 where their size is below `thresholds`; NaN stays."""
    return torch.where(values.abs() < thresholds, 0, values)


def kept_share(x_TD: Tensor, k_T: Tensor, weights: Weights, thresholds: Thresholds) -> Tensor:
    """Share of the MACs of each token's k learners that is left, float32 [T]; 1 for k = 0."""
    n, width, d_in = weights.w_in.shape
    branches, d_out = (1 if weights.w_up is None else 2), weights.b_out.shape[1]
    inputs_T = (cut(x_TD, thresholds.inputs) != 0).sum(1)
    h_TNH = kept_hidden(x_TD, weights, thresholds).unflatten(-1, (n, width))
    runs_TN = torch.arange(n, device=k_T.device) < k_T[:, None]
    hidden_T = ((h_TNH != 0).sum(-1) * runs_TN).sum(1)
    left_T = branches * inputs_T * k_T * width + hidden_T * d_out
    return torch.where(k_T == 0, 1, left_T / (k_T * width * (branches * d_in + d_out)).clamp(min=1)).float()


def _reference(*tensors: Any, form: str, act: str) -> Tensor:
    call = _checked(tensors, form=form)
    weights = Weights(*tensors[-_FLOATS:], act=act, form=form)
    if call.k.numel() and call.k.device.type == "cpu":  # elsewhere a look at k would wait for the device
        require_range(int(call.k.min()), int(call.k.max()), weights.learners)
    return sparse_output(call.x, call.k, weights, Thresholds(call.thresholds_in, call.thresholds_hidden))


def _checked(tensors: tuple[Any, ...], *, form: str, **options: Any) -> SparseArguments:
    call = SparseArguments(*tensors)
    require_learners(LearnersArguments(call.x, call.k, *tensors[-_FLOATS:], *[None] * 5), form=form, **options)
    require_thresholds(call.x, call.w_in, call.w_out, call.thresholds_in, call.thresholds_hidden, form=form)
    return call


def _fake(*tensors: Any, form: str, act: str) -> Tensor:
    call = _checked(tensors, form=form, same=may_equal)
    return call.x.new_empty(call.x.shape[0], call.b_out.shape[1])


SPARSE = define("sparse_learners", f"({schema(SparseArguments)}, *, {FORM}) -> Tensor", _reference, _fake)
map_tokens(SPARSE, SparseArguments, "weights")


class Skips(nn.Module):
    """The small values that calls of an ACM skip: of every call, or of those with one token per example alone."""

    inputs: Tensor
    hidden: Tensor

    def __init__(self, thresholds: Thresholds, *, every_call: bool) -> None:
        super().__init__()
        self.every_call = every_call
        for name, sizes in thresholds._asdict().items():
            self.register_buffer(name, sizes, persistent=False)

    @property
    def thresholds(self) -> Thresholds:
        """The sizes below which they are skipped, float32 also where the model was converted."""
        return Thresholds(self.inputs.float(), self.hidden.float())

    def learners(self, x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
        """y_{k(t)} without what is skipped, [T, O]."""
        return sparse_learners(x_TD, k_T, weights, self.thresholds)


class ValueSizes(NamedTuple):
    """Sizes of what a site's calls multiplied, times `column_norms`: quantiles in equal steps from 0 to 1."""

    inputs: tuple[float, ...]
    hidden: tuple[float, ...]


def column_norms(weights: Weights) -> tuple[Tensor, Tensor]:
    """Norms of the columns that each input, and each hidden value, is multiplied by; float32 [D] and [N, H].

    What a skipped value would have added to sums is its size times that.
    """
    firsts = [w.float().flatten(0, 1) for w in (weights.w_in, weights.w_up) if w is not None]
    assert weights.w_out is not None
    return torch.cat(firsts).norm(dim=0), weights.w_out.float().norm(dim=0)
