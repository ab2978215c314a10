"""A pair of projections as slices of themselves: learner n is the n-th part of every head's coordinates.

MACs and parameters stay, and k = N is exact. Each head gets a basis in which its first coordinates matter most:
q^T k and o(v) stay, since q' = T_q q, k' = T_k k with T_q^T T_k = I, and v' = T v, W_o' = W_o T^-1. Left-out
coordinates are replaced by their mean, b_out(k). The change of basis is proved on the model itself first.
Shapes: G heads of N * h coordinates, d of them a head, D in, O out; all float64. Where several heads of q (or o) meet
one head of k (or v), they share one basis.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.precision import to_float64
from acm_compiler.calibration.answer import Answer, answers_with, mask_in, relative_change
from acm_compiler.calibration.damage import Judged
from acm_compiler.calibration.examples import Options
from acm_compiler.calibration.linear_algebra import mean_diagonal, square_factors
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.passes.rewrite.build_acm import fitted_learners
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.passes.rewrite.offload import kept
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.site import Pair
from acm_compiler.sources.inputs import Example

_LOG = logging.getLogger(__name__)
# relative error of the model's answer, by floating type
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


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


def fit_pairs(
    found: Rewritten,
    pairs: Sequence[Sequence[SiteRecord]],
    judged: Mapping[str, Judged],
    examples: Sequence[Example],
    options: Options,
) -> dict[str, Fit]:
    """Slices for the sites of these pairs, by name, without the pairs whose change of basis the model refutes."""
    fits = [kept(fit_slices(first, second, judged)) for first, second in pairs]
    hold = _prove(found, fits, examples[0], answer=options.answer) if fits else []
    return {part.site.name: part for fit, holds in zip(fits, hold, strict=True) if holds for part in fit}


def _prove(found: Rewritten, pairs: Sequence[Sequence[Fit]], example: Example, *, answer: Answer) -> list[bool]:
    """Prove each pair: True if it leaves the output as it is; the others are named in the log.

    All pairs run all their slices in one forward. Only where that moves the output is every pair tried alone.
    """
    acms = found.acms
    tolerances = [_TOLERANCE[acms[pair[0].site.name].learners.w_in.dtype] for pair in pairs]
    learners = [
        {p.site.name: fitted_learners(p.site, p.weights, like=acms[p.site.name].learners.w_in) for p in pair}
        for pair in pairs
    ]
    mask_BS = mask_in(found.model, example)
    wanted = answers_with(found, {}, example, answer)
    everywhere = {name: module for pair in learners for name, module in pair.items()}
    if relative_change(wanted, answers_with(found, everywhere, example, answer), mask_BS) <= min(tolerances):
        return [True] * len(pairs)
    hold = []
    for pair, tolerance in zip(learners, tolerances, strict=True):
        error = relative_change(wanted, answers_with(found, pair, example, answer), mask_BS)
        hold.append(error <= tolerance)
        if not hold[-1]:
            _LOG.info("%s: not sliced, a change of basis moves the model's answer by %.1e", " and ".join(pair), error)
    return hold


@torch.no_grad()
def fit_slices(first: SiteRecord, second: SiteRecord, judged: Mapping[str, Judged]) -> list[Fit]:
    """Both sites of a pair: q and k, or o and what gives its values.

    `judged` says, by name, how they were seen in the original basis.
    """
    records = {record.site.role: record for record in (first, second)}
    if "o" not in records:
        q, k = records["q"], records["k"]
        of_q, of_k = _bases_of_heads(q, _by_head(q), k, _by_head(k))
        return [_rows(q, of_q, judged[q.site.name]), _rows(k, of_k, judged[k.site.name])]
    o = records.pop("o")
    (v,) = records.values()
    at_q, at_k, at_v = _pair(v).roles or ((), (), range(_pair(v).heads))
    weight, blocks = to_float64(o.dense.first[0][0]), head_blocks(o.moments.covariance, _pair(o).heads)
    of_v, of_o = bases_of_values(blocks, weight, judged[o.site.name].metric, heads=len(at_v))
    if at_q:  # `v` is packed: queries and keys of the same tokens are among its heads
        w_GdD, b_Gd = _by_head(v)
        of_q, of_k = _bases_of_heads(v, (w_GdD[[*at_q]], b_Gd[[*at_q]]), v, (w_GdD[[*at_k]], b_Gd[[*at_k]]))
        of_v = HeadBases.of_parts({(*at_q,): of_q, (*at_k,): of_k, (*at_v,): of_v})
    return [_rows(v, of_v, judged[v.site.name]), _columns(o, of_o, judged[o.site.name])]


def _pair(record: SiteRecord) -> Pair:
    assert record.site.pair is not None
    return record.site.pair


def _by_head(record: SiteRecord) -> tuple[Tensor, Tensor]:
    """The weight [G, d, D] and bias [G, d] of a projection's heads."""
    weight, bias = _double(record)
    parts = (_pair(record).heads, -1)
    return weight.unflatten(0, parts), bias.unflatten(0, parts)


def _bases_of_heads(
    q: SiteRecord, of_q: tuple[Tensor, Tensor], k: SiteRecord, of_k: tuple[Tensor, Tensor]
) -> tuple[HeadBases, HeadBases]:
    """Bases of queries and keys, whose heads have these weights and biases and read what the records' sites read."""
    (w_GdD, b_Gd), (keys_GdD, _) = of_q, of_k
    mean_Gd = w_GdD @ q.moments.mean + b_Gd
    second_q = _products(w_GdD, q.moments.covariance) + mean_Gd[:, :, None] * mean_Gd[:, None]
    return bases_of_scores(second_q, _products(keys_GdD, k.moments.covariance))


def _double(record: SiteRecord) -> tuple[Tensor, Tensor]:
    weight, bias = record.dense.first[0]
    w = to_float64(weight)
    return w, w.new_zeros(len(w)) if bias is None else to_float64(bias)


def _rows(record: SiteRecord, bases: HeadBases, judged: Judged) -> Fit:
    """Slices of the output of q, k or v.

    Learner n gives coordinates n * h to (n + 1) * h of every head of `T @ (w @ x + b)`; those of learners that do not
    run are their means, so `b_out[k] = where(runs, b, w @ mean(x) + b)`.
    """
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
    turned = dataclasses.replace(judged, dense=dense, root=bases.turned_columns(judged.root.T).T)
    return Fit(site=site, weights=_weights(w_NGhD, b_KO, "rows", like=judged.x_TD), judged=turned)


def _columns(record: SiteRecord, bases: HeadBases, judged: Judged) -> Fit:
    """Slices of what o reads.

    Learner n is `w[:, slice_n] @ x[slice_n]` in the values' basis; where it does not run, `b_out[k]` holds
    `w[:, slice_n] @ mean(x)[slice_n]`.
    """
    site = sliced_site(record.site)
    weight, b_O = _double(record)
    w_OD = bases.turned_columns(weight)
    mean_D = bases.turned(record.moments.mean[None])[0]
    parts = (len(bases.turn), site.learners, -1)
    w_OGNh = w_OD.unflatten(1, parts)
    left_out_NO = torch.einsum("ognh,gnh->no", w_OGNh, mean_D.unflatten(0, parts))
    missing_KO = torch.cat([left_out_NO.flip(0).cumsum(0).flip(0), torch.zeros_like(b_O)[None]])
    dense = _dense(record.dense, w_OD, b_O)
    x_TD, whole = bases.turned(judged.x_TD), judged.whole
    if whole is not None:
        whole = dataclasses.replace(whole, x_TD=x_TD if whole.x_TD is judged.x_TD else bases.turned(whole.x_TD))
    turned = dataclasses.replace(judged, dense=dense, x_TD=x_TD, whole=whole)
    weights = _weights(w_OGNh.movedim(2, 0), b_O + missing_KO, "cols", like=judged.x_TD)
    return Fit(site=site, weights=weights, judged=turned)


def _dense(before: DenseWeights, weight: Tensor, bias: Tensor) -> DenseWeights:
    like = before.first[0][0]
    return dataclasses.replace(before, first=((weight.to(like), bias.to(like)),))


def _weights(w_in: Tensor, b_out: Tensor, form: str, *, like: Tensor) -> Weights:
    absent = dict.fromkeys(("b_in", "w_up", "b_up", "w_out", "w_top"))
    return Weights(w_in=w_in.to(like).contiguous(), b_out=b_out.to(like), act="identity", form=form, **absent)


_RIDGE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBases:
    """One invertible matrix per head, new coordinates = turn @ old ones; `back` is its inverse. [G, d, d] each."""

    turn: Tensor
    back: Tensor

    @classmethod
    def of_parts(cls, parts: Mapping[tuple[int, ...], HeadBases]) -> HeadBases:
        """Bases of all heads, put together from those of some heads each, by the numbers of these."""
        order = torch.tensor([head for heads in parts for head in heads], device="cpu").argsort()
        turn, back = (torch.cat([getattr(part, name) for part in parts.values()]) for name in ("turn", "back"))
        return cls(turn=turn[order], back=back[order])

    def repeated(self, group: int) -> HeadBases:
        """The same for `group` neighbouring heads each."""
        return HeadBases(turn=self.turn.repeat_interleave(group, 0), back=self.back.repeat_interleave(group, 0))

    def turned(self, v_TF: Tensor) -> Tensor:
        """Vectors [T, G * d] in the new coordinates."""
        heads = v_TF.unflatten(-1, self.turn.shape[:2])
        return torch.einsum("tgj,gij->tgi", heads, self.turn.to(v_TF)).flatten(1)

    def turned_rows(self, w_OD: Tensor) -> Tensor:
        """A weight [G * d, D] that gives its output in the new coordinates."""
        return torch.einsum("gij,gjx->gix", self.turn, w_OD.unflatten(0, self.turn.shape[:2])).flatten(0, 1)

    def turned_columns(self, w_OD: Tensor) -> Tensor:
        """A weight [O, G * d] that reads its input in the new coordinates."""
        return torch.einsum("ogj,gji->ogi", w_OD.unflatten(1, self.turn.shape[:2]), self.back).flatten(1)


def bases_of_scores(second_q: Tensor, covariance_k: Tensor) -> tuple[HeadBases, HeadBases]:
    """Bases of queries and keys in which dropping the last coordinates costs the scores least.

    second_q [Gq, d, d]: E[q q^T] with the bias; covariance_k [Gk, d, d]: softmax ignores the mean of the keys. With
    S_q = R_q R_q^T, S_k = R_k R_k^T and R_q^T R_k = U S V^T: T_q = S^1/2 U^T R_q^-1, T_k = S^1/2 V^T R_k^-1.
    """
    group = len(second_q) // len(covariance_k)
    turns_q, turns_k = [], []
    for s_q, s_k in zip(_grouped(second_q, group), covariance_k, strict=True):
        (q_root, q_inverse), (k_root, k_inverse) = (square_factors(c, _RIDGE * mean_diagonal(c)) for c in (s_q, s_k))
        u, s, vh = torch.linalg.svd(q_root.T @ k_root)
        scale = s.clamp_min(torch.finfo(s.dtype).tiny).sqrt()[:, None]
        turns_q.append(scale * (u.T @ q_inverse))
        turns_k.append(scale * (vh @ k_inverse))
    turn_q, turn_k = torch.stack(turns_q), torch.stack(turns_k)
    # each is the other's inverse transpose
    q = HeadBases(turn=turn_q, back=turn_k.mT)
    return q.repeated(group), HeadBases(turn=turn_k, back=turn_q.mT)


def bases_of_values(covariance_o: Tensor, w_OD: Tensor, g_OO: Tensor, *, heads: int) -> tuple[HeadBases, HeadBases]:
    """Bases of the values and of what the output projection reads, for `heads` heads of values.

    covariance_o [Go, d, d]: of the projection's input, head by head; w_OD its weight, g_OO the metric of its output.
    T = E^T R^-1 with C = R R^T and E the eigenvectors of R^T W_o^T G W_o R, the largest first.
    """
    group = len(covariance_o) // heads
    per_head = _products(w_OD.T.unflatten(0, (len(covariance_o), -1)), g_OO)
    turns, backs = [], []
    for c, m in zip(_grouped(covariance_o, group), _grouped(per_head, group), strict=True):
        root, inverse = square_factors(c, _RIDGE * mean_diagonal(c))
        vectors = torch.linalg.eigh(root.T @ m @ root).eigenvectors.flip(1)
        turns.append(vectors.T @ inverse)
        backs.append(root @ vectors)
    v = HeadBases(turn=torch.stack(turns), back=torch.stack(backs))
    return v, v.repeated(group)


def head_blocks(c_FF: Tensor, heads: int) -> Tensor:
    """The blocks [G, d, d] on the diagonal of [G * d, G * d]."""
    size = len(c_FF) // heads
    blocks = c_FF.unflatten(0, (heads, size)).unflatten(2, (heads, size))
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)


def _products(w_GdD: Tensor, c_DD: Tensor) -> Tensor:
    """w c w^T of every head, [G, d, d]."""
    return w_GdD @ c_DD @ w_GdD.mT


def _grouped(blocks: Tensor, group: int) -> Tensor:
    return blocks.unflatten(0, (-1, group)).mean(1)
