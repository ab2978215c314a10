"""A pair of projections as slices of themselves: learner n is the n-th part of every head's coordinates.

The equations: docs/semantics.md, Projections.

MACs and parameters stay, k = N is exact; what a token leaves out is replaced by its mean, b_out(k).
Shapes: G heads of N * h coordinates, D in, O out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import Weights
from acm_compiler.calibration.damage import Judged
from acm_compiler.calibration.dense_weights import DenseWeights
from acm_compiler.calibration.head_bases import HeadBases, bases_of_scores, bases_of_values, head_blocks, head_products
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.planning.plan import PlannedSite


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A site's learners and what they are judged by."""

    site: PlannedSite
    weights: Weights
    judged: Judged


def sliced_site(site: PlannedSite) -> PlannedSite:
    """`site` as it will be with slices for learners."""
    features = site.d_in if site.role == "o" else site.d_out
    return dataclasses.replace(site, form="slices", width=features // site.learners, state="learners")


@torch.no_grad()
def fit_slices(first: SiteRecord, second: SiteRecord, judged: Mapping[str, Judged]) -> list[Fit]:
    """Both sites of a pair; `judged` says, by name, how they were seen in the original basis."""
    records = {record.site.role: record for record in (first, second)}
    if "o" in records:
        v, o = records["v"], records["o"]
        weight = to_float64(o.dense.first[0][0])
        blocks = head_blocks(o.moments.covariance, _heads(o))
        of_v, of_o = bases_of_values(blocks, weight, judged[o.site.name].metric, heads=_heads(v))
        return [_rows(v, of_v, judged[v.site.name]), _columns(o, of_o, judged[o.site.name])]
    q, k = records["q"], records["k"]
    (w_q, b_q), (w_k, _) = _double(q), _double(k)
    mean_Gd = (w_q @ q.moments.mean + b_q).unflatten(0, (_heads(q), -1))
    second_q = head_products(w_q, q.moments.covariance, _heads(q)) + mean_Gd[:, :, None] * mean_Gd[:, None]
    of_q, of_k = bases_of_scores(second_q, head_products(w_k, k.moments.covariance, _heads(k)))
    return [_rows(q, of_q, judged[q.site.name]), _rows(k, of_k, judged[k.site.name])]


def _heads(record: SiteRecord) -> int:
    assert record.site.pair is not None
    return record.site.pair.heads


def _double(record: SiteRecord) -> tuple[Tensor, Tensor]:
    weight, bias = record.dense.first[0]
    w = to_float64(weight)
    return w, w.new_zeros(len(w)) if bias is None else to_float64(bias)


def _rows(record: SiteRecord, bases: HeadBases, judged: Judged) -> Fit:
    """Slices of the output of q, k or v."""
    site = sliced_site(record.site)
    weight, bias = _double(record)
    w_OD, b_O = bases.turned_rows(weight), bases.turned_rows(bias[:, None])[:, 0]
    mean_O = w_OD @ record.moments.mean + b_O
    parts = (len(bases.turn), site.learners, -1)
    runs = torch.arange(site.learners, device=w_OD.device)
    fits_KN1 = (runs[None] < torch.arange(site.learners + 1, device=w_OD.device)[:, None])[:, None, :, None]
    b_KO = torch.where(fits_KN1, b_O.unflatten(0, parts), mean_O.unflatten(0, parts)).flatten(1)
    w_NGhD = w_OD.unflatten(0, parts).movedim(1, 0)
    dense = _dense(record.dense, w_OD, b_O)
    whole = judged.whole
    if whole is not None:
        turned_TO = bases.turned_columns(to_float64(whole.g_TPO.flatten(0, 1)))
        whole = dataclasses.replace(whole, g_TPO=turned_TO.view_as(whole.g_TPO).to(whole.g_TPO))
    turned = dataclasses.replace(judged, dense=dense, metric=bases.turned_metric(judged.metric), whole=whole)
    return Fit(site=site, weights=_weights(w_NGhD, b_KO, "rows", like=judged.x_TD), judged=turned)


def _columns(record: SiteRecord, bases: HeadBases, judged: Judged) -> Fit:
    """Slices of what o reads."""
    site = sliced_site(record.site)
    weight, b_O = _double(record)
    w_OD = bases.turned_columns(weight)
    mean_D = bases.turned(record.moments.mean[None])[0]
    parts = (len(bases.turn), site.learners, -1)
    w_OGNh = w_OD.unflatten(1, parts)
    left_out_NO = torch.einsum("ognh,gnh->no", w_OGNh, mean_D.unflatten(0, parts))
    missing_KO = torch.cat([left_out_NO.flip(0).cumsum(0).flip(0), torch.zeros_like(b_O)[None]])
    dense = _dense(record.dense, w_OD, b_O)
    whole = judged.whole
    if whole is not None:
        whole = dataclasses.replace(whole, x_TD=bases.turned(whole.x_TD))
    turned = dataclasses.replace(judged, dense=dense, x_TD=bases.turned(judged.x_TD), whole=whole)
    weights = _weights(w_OGNh.movedim(2, 0), b_O + missing_KO, "cols", like=judged.x_TD)
    return Fit(site=site, weights=weights, judged=turned)


def _dense(before: DenseWeights, weight: Tensor, bias: Tensor) -> DenseWeights:
    like = before.first[0][0]
    return dataclasses.replace(before, first=((weight.to(like), bias.to(like)),))


def _weights(w_in: Tensor, b_out: Tensor, form: str, *, like: Tensor) -> Weights:
    absent = dict.fromkeys(("b_in", "w_up", "b_up", "w_out", "w_top"))
    return Weights(w_in=w_in.to(like).contiguous(), b_out=b_out.to(like), act="identity", form=form, **absent)
