"""Damage: the expected change of the model's output for each k, token by token (docs/semantics.md).

e_t(k) = |g_t|^2 d_k^T G d_k / tr G, d_k = y_k - o: the error of k learners in the metric of the site's output, times
the token's weight. The scale for each k is set by examples kept whole, where E[(sum over tokens of g . d_k)^2] is
known: errors that tokens share do far more damage together than one by one.

With r standard normal, the gradient g of sum(r * output) at a site's output has E[(g . d)^2] = |J d|^2: the squared
change of the model's output that a change d there causes, to first order.

Errors are small beside outputs, and their difference in fp32 is little but rounding where learners are good. So what
errs is told apart from what agrees before a token is seen: the highest k that shares its second layer has one matrix,
of which the dense one is taken off in float64, and below it every k errs by what it drops: d_k = d_{k+1} - s_k + bias.
Where first layers were trained, learners share no neurons with the dense layer: the one matrix then reads both.
Shapes: T tokens, C choices of k, D in, O out, E examples, P projections of the output, N learners of H, U what the
dense matrix reads, R rank of the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import hidden
from acm_compiler.calibration.linear_algebra import thin_factors
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.passes.rewrite.offload import kept
from acm_compiler.runtime import ranks

_BLOCK = 2048
# as many examples in which tokens do damage by themselves are imagined beside those seen
_IMAGINED = 4
# the part of a token's weight that is the same for all tokens, where weights are evened out
_ALIKE = 0.8
# x -> what matrices of whole prefixes read [T, U], and what each learner's own reads [T, N, H]
Features = Callable[[Tensor], tuple[Tensor, Tensor]]
# matrix [R, U] and bias [R] of an error; None where there is none
Affine = tuple[Tensor, Tensor] | None


def mean_trace(records: Iterable[SiteRecord]) -> float:
    """tr G, averaged over the sites that a gradient reached; 1 when it reached none."""
    traces = [record.metric.trace for record in records if record.metric.trace > 0]
    return sum(traces) / len(traces) if traces else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Examples kept whole, for what their tokens do together.

    x_TD: the tokens; the sample itself where that holds them, at `at_T`. g_TPR: gradients in coordinates in which
    their product with an error through the metric is that with the error. listens_T: |g|^2 of each.
    """

    x_TD: Tensor
    g_TPR: Tensor
    listens_T: Tensor
    example_T: Tensor
    at_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Facts against which a site's learners are judged, in the basis in which they live.

    dense: the weights they replace, neurons in the order of the learners. root: R with R R^T = G over its trace in
    the original basis, [O, R]. x_TD: inputs of sampled tokens, listens_T: |g|^2 of each. whole: examples kept whole,
    None where no gradient reached any.
    """

    dense: DenseWeights
    root: Tensor
    x_TD: Tensor
    listens_T: Tensor
    whole: Together | None = None

    @staticmethod
    def of(record: SiteRecord, x_TD: Tensor, *, elsewhere: float) -> Judged:
        """A site as it was seen; `x_TD` is what its sample holds.

        Where no gradient ever reached it, every token and direction of it is taken to matter alike, as much as other
        sites do: `elsewhere` is their mean trace.
        """
        metric, listens_T = record.metric.value(record.site.d_out, record.home), record.sample.weights
        trace, whole = metric.trace(), None
        if trace > 0:
            root, inverse = thin_factors(metric / trace)
            whole = _together(record, x_TD, inverse)
        else:
            root = torch.eye(len(metric)).to(metric) / len(metric) ** 0.5
            listens_T = torch.full_like(listens_T, elsewhere)
        root, whole = kept(root), kept(whole)
        return Judged(dense=record.dense, root=root, x_TD=x_TD, listens_T=listens_T, whole=whole)

    @property
    def metric(self) -> Tensor:
        """G over its trace in the original basis, [O, O]."""
        return self.root @ self.root.T


def _together(record: SiteRecord, sample_TD: Tensor, inverse_RO: Tensor) -> Together | None:
    whole = record.whole.take()
    if whole is None:
        return None
    in_sample = record.sample.holds_all and ranks.world() == 1
    return Together(
        x_TD=sample_TD if in_sample else whole.x_TD,
        g_TPR=whole.g_TPO @ inverse_RO.T.to(whole.g_TPO),
        listens_T=whole.g_TPO.square().sum((1, 2)),
        example_T=whole.example_T,
        at_T=whole.at_T if in_sample else torch.arange(len(whole.at_T), device=whole.at_T.device),
    )


def evened(weight_T: Tensor) -> Tensor:
    """Weights of tokens, most of each the mean of all.

    Gradients hold for small errors at one site. Where many sites err at once, a token that the output hardly listened
    to may drift until it does.
    """
    return torch.lerp(weight_T, weight_T.mean(), _ALIKE)


@torch.no_grad()
def token_errors(weights: Weights, judged: Judged, k_min: int) -> Tensor:
    """e_t(k) of tokens that weigh one each, for every k from k_min to N, fp32 [T, C]; never negative."""
    errors = errors_of_k(weights, judged.dense, judged.root)
    whole = judged.whole
    size_TC, sums = _measure(errors, judged.x_TD, k_min, whole if whole and whole.x_TD is judged.x_TD else None)
    if whole is not None and whole.x_TD is not judged.x_TD:
        sums = _measure(errors, whole.x_TD, k_min, whole)[1]
    factor_C = _factor(sums, 0 if whole is None else int(whole.example_T.max()) + 1)
    return (size_TC * factor_C.to(size_TC)).float()


def _measure(errors: ErrorsOfK, x_TD: Tensor, k_min: int, whole: Together | None) -> tuple[Tensor, Tensor]:
    """d^T G d / tr G of every token and choice, [T, C], and of whole examples both their damages, float64 [2, C].

    Both are sums over the examples: what their tokens do together, and what each would do alone.
    """
    sizes = []
    examples, projections = (0, 0) if whole is None else (int(whole.example_T.max()) + 1, whole.g_TPR.shape[1])
    moved_CEP = x_TD.new_zeros(len(errors.dropped[1]) + 1 - k_min, examples, projections)
    for first in range(0, len(x_TD), _BLOCK):
        d_CTR = errors(x_TD[first : first + _BLOCK], k_min)
        sizes.append(torch.linalg.vector_norm(d_CTR, dim=-1).square().T)
        if whole is not None:
            here = (whole.at_T >= first) & (whole.at_T < first + _BLOCK)
            moved_CTP = torch.einsum("ctr,tpr->ctp", d_CTR[:, whole.at_T[here] - first], whole.g_TPR[here])
            moved_CEP.index_add_(1, whole.example_T[here], moved_CTP)
    size_TC = torch.cat(sizes)
    joined_C = to_float64(moved_CEP).square().sum((1, 2))
    if whole is None:
        return size_TC, torch.stack([joined_C, joined_C])
    alone_C = (to_float64(size_TC[whole.at_T]) * to_float64(whole.listens_T)[:, None]).sum(0)
    return size_TC, torch.stack([joined_C, alone_C])


def _factor(sums: Tensor, examples: int) -> Tensor:
    """Joint effect of an example's tokens over the sum of each one's alone, for every k, [C]."""
    joined_C, alone_C = ranks.total(sums)
    examples = sum(ranks.gathered(examples))
    # where k learners are exact, both are rounding
    seen_C = torch.where(alone_C > 0, joined_C / alone_C.clamp_min(torch.finfo(alone_C.dtype).tiny), 1.0)
    return (seen_C * examples + _IMAGINED) / (examples + _IMAGINED)


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
