"""A basis for every head of an attention, in which its first coordinates are the ones that matter.

The equations: docs/semantics.md, Projections.

q^T k and o(v) stay what they are: q' = T_q q, k' = T_k k with T_q^T T_k = I, and v' = T v, W_o' = W_o T^-1.
Shapes: G heads of d coordinates, D in, O out; all float64. Where several heads of q (or o) meet one head of k (or v),
they share one basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.calibration.symmetric import square_factors

_RIDGE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBases:
    """One invertible matrix per head, new coordinates = turn @ old ones; `back` is its inverse. [G, d, d] each."""

    turn: Tensor
    back: Tensor

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

    def turned_metric(self, g_FF: Tensor) -> Tensor:
        """A metric [G * d, G * d] of the old coordinates, for the new ones."""
        columns = self.turned_columns(g_FF)
        return self.turned_columns(columns.T).T


def bases_of_scores(second_q: Tensor, covariance_k: Tensor) -> tuple[HeadBases, HeadBases]:
    """Bases of queries and keys in which dropping the last coordinates costs the scores least.

    second_q [Gq, d, d]: E[q q^T] with the bias; covariance_k [Gk, d, d]: softmax ignores the mean of the keys. With
    S_q = R_q R_q^T, S_k = R_k R_k^T and R_q^T R_k = U S V^T: T_q = S^1/2 U^T R_q^-1, T_k = S^1/2 V^T R_k^-1.
    """
    group = len(second_q) // len(covariance_k)
    turns_q, turns_k = [], []
    for s_q, s_k in zip(_grouped(second_q, group), covariance_k, strict=True):
        (q_root, q_inverse), (k_root, k_inverse) = square_factors(s_q, _RIDGE), square_factors(s_k, _RIDGE)
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
    per_head = head_products(w_OD.T, g_OO, len(covariance_o))
    turns, backs = [], []
    for c, m in zip(_grouped(covariance_o, group), _grouped(per_head, group), strict=True):
        root, inverse = square_factors(c, _RIDGE)
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


def head_products(w_FD: Tensor, c_DD: Tensor, heads: int) -> Tensor:
    """The blocks [G, d, d] on the diagonal of w c w^T."""
    w_GdD = w_FD.unflatten(0, (heads, -1))
    return (w_FD @ c_DD).view_as(w_GdD) @ w_GdD.mT


def _grouped(blocks: Tensor, group: int) -> Tensor:
    return blocks.unflatten(0, (-1, group)).mean(1)
