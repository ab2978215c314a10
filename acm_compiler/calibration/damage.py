"""How much each k is expected to change the model's output, token by token (QUALITY 2).

e_t(k) = |g_t|^2 d_k^T G d_k / tr G, d_k = y_k - o: what k learners do instead of the dense region, in the metric of the
site's output, times how much the model's output listens to this token.
Shapes: T tokens, C choices of k, O out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.acm.reference import Weights, all_outputs
from acm_compiler.calibration.dense_weights import DenseWeights
from acm_compiler.calibration.site_record import SiteRecord

_BLOCK = 2048


def mean_trace(records: Iterable[SiteRecord]) -> float:
    """tr G, averaged over the sites that a gradient reached; 1 when it reached none."""
    traces = [trace for record in records if (trace := float(_metric(record).trace())) > 0]
    return sum(traces) / len(traces) if traces else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a site's learners are held against, in the basis in which they live.

    dense: the weights they replace. metric: G over its trace in the original basis, [O, O]. x_TD: inputs of sampled
    tokens, listens_T: |g|^2 of each.
    """

    dense: DenseWeights
    metric: Tensor
    x_TD: Tensor
    listens_T: Tensor

    @staticmethod
    def of(record: SiteRecord, *, elsewhere: float) -> Judged:
        """A site as it was seen.

        Where no gradient ever reached it, every token and direction of it is taken to matter alike, as much as other
        sites do: `elsewhere` is their mean trace.
        """
        metric, listens_T = _metric(record), record.sample.weights
        trace = metric.trace()
        if not trace > 0:
            metric, trace = torch.eye(len(metric)).to(metric), metric.new_tensor(len(metric))
            listens_T = torch.full_like(listens_T, elsewhere)
        return Judged(dense=record.dense, metric=metric / trace, x_TD=record.sample.vectors, listens_T=listens_T)


@torch.no_grad()
def token_damage(weights: Weights, judged: Judged, k_min: int) -> Tensor:
    """e_t(k) for the sampled tokens and every k from k_min to N, fp32 [T, C]; never negative."""
    x_TD = judged.x_TD
    g_OO = judged.metric.to(x_TD)
    blocks = []
    for start in range(0, len(x_TD), _BLOCK):
        x = x_TD[start : start + _BLOCK]
        d_CTO = all_outputs(x, weights, k_min) - judged.dense.output(x)
        blocks.append(((d_CTO @ g_OO) * d_CTO).sum(-1).T)
    return torch.cat(blocks).float().clamp_min(0) * judged.listens_T[:, None]


def _metric(record: SiteRecord) -> Tensor:
    return record.metric.value(record.site.d_out, record.home)
