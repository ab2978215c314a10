"""How much each k is expected to change the model's output, token by token (docs/semantics.md, Expected damage).

e_t(k) = |g_t|^2 d_k^T G d_k / tr G, d_k = y_k - o: what k learners do instead of the dense region, in the metric of the
site's output, times how much the model's output listens to this token. Its scale, for each k, is set by examples kept
whole, where E[(sum over tokens of g . d_k)^2] is known: tokens that are wrong alike do far more damage together than
one by one (where a pooled output listens to all of them alike, up to fifty times as much).
Shapes: T tokens, C choices of k, O out, E examples, P projections of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import Weights, all_outputs
from acm_compiler.calibration import ranks
from acm_compiler.calibration.dense_weights import DenseWeights
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.calibration.whole_examples import Whole

_BLOCK = 2048
# as many examples in which tokens do damage by themselves are imagined beside those seen
_IMAGINED = 4


def mean_trace(records: Iterable[SiteRecord]) -> float:
    """tr G, averaged over the sites that a gradient reached; 1 when it reached none."""
    traces = [trace for record in records if (trace := float(_metric(record).trace())) > 0]
    return sum(traces) / len(traces) if traces else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a site's learners are held against, in the basis in which they live.

    dense: the weights they replace. metric: G over its trace in the original basis, [O, O]. x_TD: inputs of sampled
    tokens, listens_T: |g|^2 of each. whole: examples kept whole, None where no gradient reached any.
    """

    dense: DenseWeights
    metric: Tensor
    x_TD: Tensor
    listens_T: Tensor
    whole: Whole | None = None

    @staticmethod
    def of(record: SiteRecord, *, elsewhere: float) -> Judged:
        """A site as it was seen.

        Where no gradient ever reached it, every token and direction of it is taken to matter alike, as much as other
        sites do: `elsewhere` is their mean trace.
        """
        metric, listens_T = _metric(record), record.sample.weights
        trace, whole = metric.trace(), record.whole.value()
        if not trace > 0:
            whole = None
            metric, trace = torch.eye(len(metric)).to(metric), metric.new_tensor(len(metric))
            listens_T = torch.full_like(listens_T, elsewhere)
        return Judged(
            dense=record.dense,
            metric=metric / trace,
            x_TD=record.sample.vectors,
            listens_T=listens_T,
            whole=whole,
        )


@torch.no_grad()
def token_damage(weights: Weights, judged: Judged, k_min: int) -> Tensor:
    """e_t(k) for the sampled tokens and every k from k_min to N, fp32 [T, C]; never negative."""
    blocks = []
    for x in judged.x_TD.split(_BLOCK):
        d_CTO = all_outputs(x, weights, k_min) - judged.dense.output(x)
        blocks.append(_size(d_CTO, judged))
    return torch.cat(blocks).float() * judged.listens_T[:, None] * together(weights, judged, k_min).float()


@torch.no_grad()
def together(weights: Weights, judged: Judged, k_min: int) -> Tensor:
    """What an example's tokens do together over the sum of what each would do, for every k from k_min to N, [C]."""
    choices = weights.learners + 1 - k_min
    sums = torch.zeros(2, choices, dtype=torch.float64, device=judged.metric.device)
    examples = 0
    if judged.whole is not None:
        sums, examples = _on_whole(weights, judged, judged.whole, k_min), int(judged.whole.example_T.max()) + 1
    joined, alone = ranks.total(sums)
    examples = sum(ranks.gathered(examples))
    # where k learners are exact, both are rounding
    seen = torch.where(alone > 0, joined / alone.clamp_min(torch.finfo(alone.dtype).tiny), 1.0)
    return ((seen * examples + _IMAGINED) / (examples + _IMAGINED)).to(judged.x_TD)


def _on_whole(weights: Weights, judged: Judged, whole: Whole, k_min: int) -> Tensor:
    """Sums over the whole examples of both damages, float64 [2, C]."""
    examples = int(whole.example_T.max()) + 1
    moved_CEP = whole.x_TD.new_zeros(weights.learners + 1 - k_min, examples, whole.g_TPO.shape[1])
    alone_C = moved_CEP.new_zeros(len(moved_CEP))
    streams = (whole.x_TD, whole.g_TPO, whole.listens_T, whole.example_T)
    for x_TD, g_TPO, listens_T, example_T in zip(*(t.split(_BLOCK) for t in streams), strict=True):
        d_CTO = all_outputs(x_TD, weights, k_min) - judged.dense.output(x_TD)
        moved_CEP.index_add_(1, example_T, torch.einsum("cto,tpo->ctp", d_CTO, g_TPO))
        alone_C += (_size(d_CTO, judged) * listens_T[:, None]).sum(0)
    return torch.stack([to_float64(moved_CEP).square().sum((1, 2)), to_float64(alone_C)])


def _size(d_CTO: Tensor, judged: Judged) -> Tensor:
    """d^T G d / tr G of every choice, [T, C]; never negative."""
    return ((d_CTO @ judged.metric.to(d_CTO)) * d_CTO).sum(-1).T.clamp_min(0)


def _metric(record: SiteRecord) -> Tensor:
    return record.metric.value(record.site.d_out, record.home)
