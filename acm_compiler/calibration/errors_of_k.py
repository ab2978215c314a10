"""The error of every k, d_k = y_k - o, seen through the metric of the output.

Errors are small beside outputs, and their difference in fp32 is little but rounding where learners are good. So what
errs is told apart from what agrees before a token is seen: the highest k that shares its second layer has one matrix,
of which the dense one is taken off in float64, and below it every k errs by what it drops: d_k = d_{k+1} - s_k + bias.
Where first layers were trained, learners share no neurons with the dense layer: the one matrix then reads both.
Shapes: T tokens, D in, O out, N learners of H, U what the dense matrix reads, R rank of the metric, C choices of k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import Weights, hidden
from acm_compiler.passes.rewrite.dense_region import DenseWeights

# x -> what matrices of whole prefixes read [T, U], and what each learner's own reads [T, N, H]
Features = Callable[[Tensor], tuple[Tensor, Tensor]]
# matrix [R, U] and bias [R] of an error; None where there is none
Affine = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorsOfK:
    """R^T d_k for tokens x, where R R^T is the metric of the output: |R^T d|^2 = d^T G d.

    own: errors of k that have a matrix of their own. dropped: matrix [N, R, H] and bias [N, R] of what changes when
    learner n is left out.
    """

    features: Features
    own: Mapping[int, Affine]
    dropped: tuple[Tensor, Tensor]

    def __call__(self, x_TD: Tensor, k_min: int) -> Tensor:
        """The errors of k from k_min to N, [C, T, R]."""
        u_TU, h_TNH = self.features(x_TD)
        matrix_NRH, bias_NR = self.dropped
        nothing_TR = u_TU.new_zeros(len(x_TD), bias_NR.shape[1])
        errors = {k: nothing_TR if own is None else F.linear(u_TU, *own) for k, own in self.own.items()}
        for n in reversed(range(k_min, min(errors))):
            errors[n] = errors[n + 1] + F.linear(h_TNH[:, n], matrix_NRH[n], bias_NR[n])
        return torch.stack([errors[k] for k in range(k_min, len(bias_NR) + 1)])


def errors_of_k(weights: Weights, dense: DenseWeights, root_OR: Tensor) -> ErrorsOfK:
    """The errors of learners that hold the neurons of `dense` in its own order, or trained ones, through a root of the
    metric.
    """
    root_RO, b_KO, like = root_OR.T, to_float64(weights.b_out), weights.b_out
    b_O = (dense.last or dense.first[0])[1]
    off_KO = b_KO if b_O is None else b_KO - to_float64(b_O)
    own: dict[int, Affine] = {}
    for k in _with_own_matrix(weights):
        excess_OU = _excess(weights, dense, k)
        own[k] = None
        if excess_OU is not None and (excess_OU.any() or off_KO[k].any()):
            own[k] = ((root_RO @ excess_OU).to(like), (root_RO @ off_KO[k]).to(like))
    matrix_NRH = -_added(weights, root_RO)
    bias_NR = (b_KO[:-1] - b_KO[1:]) @ root_OR
    dropped = (matrix_NRH.to(like), bias_NR.to(like))
    return ErrorsOfK(features=_features(weights, dense), own=own, dropped=dropped)


def _with_own_matrix(weights: Weights) -> list[int]:
    """The k that are no sum of learners and, of those that are, the highest."""
    last = weights.learners
    if weights.w_out is not None and weights.w_out.dim() == 4:
        return list(range(last + 1))
    return [last] if weights.w_top is None else [last - 1, last]


def _excess(weights: Weights, dense: DenseWeights, k: int) -> Tensor | None:
    """Excess of the matrix of k learners over the dense one, float64 [O, U]; None for slices, which are the dense."""
    if weights.w_out is None:
        return None
    last_OU = to_float64((dense.last or dense.first[0])[0])
    if k == weights.learners and weights.w_top is not None:
        own_OU = to_float64(weights.w_top)
    else:
        w_ONH = weights.w_out if weights.w_out.dim() == 3 else weights.w_out[max(k, 1) - 1]
        own_OU = to_float64(w_ONH[:, :k]).flatten(1)
        if dense.last is None:
            own_OU = own_OU @ to_float64(weights.w_in[:k]).flatten(0, 1)
    held = 0 if dense.last is None else weights.learners * weights.w_in.shape[1]
    if _has_own_neurons(weights, dense):
        return torch.cat([_padded(own_OU, held), -last_OU], 1)
    read = max(held, last_OU.shape[1])
    return _padded(own_OU, read) - _padded(last_OU, read)


def _added(weights: Weights, root_RO: Tensor) -> Tensor:
    """Matrix from what learner n reads to what it adds to the output, through the metric, float64 [N, R, H]."""
    if weights.form == "rows":
        heads, width = weights.w_in.shape[1:3]
        return root_RO.unflatten(1, (heads, weights.learners, width)).movedim(2, 0).flatten(2)
    if weights.form == "cols":
        return root_RO @ to_float64(weights.w_in).flatten(2)
    assert weights.w_out is not None
    w_ONH = weights.w_out if weights.w_out.dim() == 3 else weights.w_out[-1]
    return root_RO @ to_float64(w_ONH).movedim(1, 0)


def _has_own_neurons(weights: Weights, dense: DenseWeights) -> bool:
    """True for an MLP's learners whose first layers are not rows of the dense ones."""
    if dense.last is None:
        return False
    pairs = zip((weights.w_in, weights.w_up), dense.first, strict=False)
    held = weights.learners * weights.w_in.shape[1]
    return not all(own is None or torch.equal(own.flatten(0, 1)[: len(w)], w[:held]) for own, (w, _) in pairs)


def _features(weights: Weights, dense: DenseWeights) -> Features:
    learners = weights.learners
    if _has_own_neurons(weights, dense):

        def both(x_TD: Tensor) -> tuple[Tensor, Tensor]:
            own_TR = hidden(x_TD, weights, learners)
            return torch.cat([own_TR, dense.hidden(x_TD)], 1), own_TR.unflatten(1, (learners, -1))

        return both
    if dense.last is not None:
        held = learners * weights.w_in.shape[1]

        def neurons(x_TD: Tensor) -> tuple[Tensor, Tensor]:
            h_TU = dense.hidden(x_TD)
            h_TU = _padded(h_TU, max(held, h_TU.shape[1]))
            return h_TU, h_TU[:, :held].unflatten(1, (learners, -1))

        return neurons
    if weights.form == "cols":
        heads, width = weights.w_in.shape[2:]
        return lambda x_TD: (x_TD, x_TD.unflatten(1, (heads, learners, width)).movedim(1, 2).flatten(2))
    w_FD = weights.w_in.flatten(0, -2)
    return lambda x_TD: (x_TD, F.linear(x_TD, w_FD).unflatten(1, (learners, -1)))


def _padded(values: Tensor, columns: int) -> Tensor:
    return F.pad(values, (0, columns - values.shape[1]))
