"""An MLP's learners in closed form: the order of its neurons, and the second layers (docs/semantics.md, MLPs).

The first `width` neurons of the order are learner 0, and so on. The MLP's output is linear in its hidden activation h,
so all follows from the mean and covariance C of h.
Shapes: F hidden neurons, O out, N learners of width H, K = kept neurons in their order; all float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from acm_compiler.calibration.linear_algebra import cholesky, mean_diagonal, missing_tokens, solve, usual_diagonal
from acm_compiler.planning.decisions import SecondLayer

# part of the usual variance of a neuron that is added to each: neurons that say the same leave nothing to divide by
RIDGE = 1e-4
# a part of the mean's square that is added, too: what varies less than rounding does says nothing
_ROUNDING = 1e-12
# tokens that are imagined for one that a refit is missing
_IMAGINED = 0.2
# in a matrix shared by all k, an error counts by its least value to the power of -_EVEN; least values far below _FLOOR,
# a part of the error without learners, are as good as none
_EVEN, _FLOOR = 0.5, 1e-3
# neurons picked in one block, and among how many
_PICKS, _CANDIDATES = 16, 48
# the greedy order takes about F^3 multiply-adds; beyond this width on this kind of device it is not worth the wait
_WIDEST = {"cpu": 8192, "cuda": 32768}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Statistics of an MLP: covariance and mean of its hidden activation, weight and bias of its second layer.

    tokens: how many the covariance was taken over.
    """

    tokens: float
    c_FF: Tensor
    mean_F: Tensor
    w_OF: Tensor
    b_O: Tensor

    @property
    def mean_output(self) -> Tensor:
        """Mean of the MLP's output, [O]."""
        return self.w_OF @ self.mean_F + self.b_O


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLayerFit:
    """w_out [O, N, H] or [N, O, N, H]; b_out [N + 1, O]; w_top [O, N * H] or None."""

    w_out: Tensor
    b_out: Tensor
    w_top: Tensor | None


def fit_second_layer(
    hidden: Hidden, order_K: Tensor, kind: SecondLayer, *, learners: int, width: int
) -> SecondLayerFit:
    """The second layer of learners that hold the neurons `order_K`, the first `width` of them learner 0, and so on.

    shared: one matrix for every k, the minimiser of the weighted sum of all k's errors. shared_top: the same for k < N,
    and the dense matrix at N. per_k: a matrix for each k, the dense one at N. original: the dense columns, not
    refitted. Each k has the bias that makes its mean output right. Where N * H < F neurons were dropped, N is refitted
    like any other k.
    """
    fit = _NormalEquations(hidden, order_K, learners, width)
    w_top = None
    if kind == "per_k":
        prefixes = [fit.own(k) for k in range(1, learners + 1)]
        w_out = torch.stack([fit.padded(v_SO) for v_SO in prefixes])
    else:
        has_top = kind == "shared_top"
        v_SO = fit.dense_KO if kind == "original" else fit.shared(learners - 1 if has_top else learners)
        prefixes = [v_SO[: fit.neurons(k)] for k in range(1, learners + 1)]
        # below the top nothing runs the last learner: its columns there are the dense ones
        w_out = fit.padded(torch.cat([v_SO, fit.dense_KO[len(v_SO) :]]))
        if has_top:
            prefixes[-1] = fit.own(learners)
            w_top = fit.padded(prefixes[-1])
    b_out = torch.stack([hidden.mean_output, *(fit.bias(v_SO) for v_SO in prefixes)])
    if fit.complete and kind != "shared":
        # the dense layer at the top, bit for bit
        b_out[learners] = hidden.b_O
    return SecondLayerFit(w_out=w_out.unflatten(-1, (learners, width)), b_out=b_out, w_top=w_top)


def refit_ridge(hidden: Hidden) -> Tensor:
    """Ridge that holds each neuron's column to the dense one, [F].

    A refit from few tokens learns them by heart. For every five that are missing to ten per neuron one more is
    imagined, in which neurons vary independently and the dense layer is right.
    """
    even = RIDGE * usual_diagonal(hidden.c_FF) + _ROUNDING * hidden.mean_F.square().mean()
    return even + _IMAGINED * missing_tokens(hidden.tokens, len(hidden.c_FF)) * hidden.c_FF.diagonal()


def weight_of_k(errors_N: Tensor) -> Tensor:
    """Weight of each k's error in a matrix shared by all, given the least that each can have, as parts of that of none.

    Errors fall with k, and gates send the tokens that matter to large k: equal weights would serve small k only.
    """
    return (errors_N.clamp_min(0) + _FLOOR) ** -_EVEN


class _NormalEquations:
    """The normal equations of one MLP in the order of its learners, and their solutions.

    S: the kept neurons of the first learners. A solution holds the rows V of its neurons, [S, O] or [K, O].
    """

    def __init__(self, hidden: Hidden, order_K: Tensor, learners: int, width: int) -> None:
        self.hidden, self.learners, self.width = hidden, learners, width
        self.order = order_K[: learners * width]
        self.complete = len(self.order) == len(hidden.c_FF)
        self.dense_KO = hidden.w_OF[:, self.order].T
        self.ridge_K = refit_ridge(hidden)[self.order]

    @cached_property
    def c_KK(self) -> Tensor:
        """Covariance of the kept neurons."""
        return self.hidden.c_FF[self.order][:, self.order]

    @cached_property
    def cross_KO(self) -> Tensor:
        """Covariance of the kept neurons with the output."""
        return self.hidden.c_FF[self.order] @ self.hidden.w_OF.T

    def neurons(self, k: int) -> int:
        """Number of kept neurons in k learners."""
        return min(k * self.width, len(self.order))

    def own(self, k: int) -> Tensor:
        """The best matrix for the first k learners alone, ridged towards the dense columns."""
        s = self.neurons(k)
        if s == len(self.hidden.c_FF):
            return self.dense_KO
        ridge_S = self.ridge_K[:s]
        a_SS = self.c_KK[:s, :s] + torch.diag(ridge_S)
        return solve(a_SS, self.cross_KO[:s] + ridge_S[:, None] * self.dense_KO[:s])

    def _least_errors(self, learners: int) -> Tensor:
        """E|y - V_k h_k|^2 of each k's own matrix, up to `learners`, as parts of the error of the mean output."""
        total = (self.hidden.w_OF @ self.hidden.c_FF * self.hidden.w_OF).sum()
        errors = []
        for v_SO in map(self.own, range(1, learners + 1)):
            s = len(v_SO)
            errors.append(total + (v_SO * (self.c_KK[:s, :s] @ v_SO - 2 * self.cross_KO[:s])).sum())
        return torch.stack(errors) / total.clamp_min(torch.finfo(total.dtype).tiny) if errors else total.new_zeros(0)

    def shared(self, learners: int) -> Tensor:
        """One matrix for every k up to `learners`.

        It is the argmin over V of sum_k w_k (|y - V_k h_k|^2 + ridge |V_k - W_k|^2), V_k the first k learners' part of
        V. Its normal equations weigh block (n, m) of C by omega_max(n, m), omega_n = sum of w_k over k > n.
        """
        s = self.neurons(learners)
        weight_N = weight_of_k(self._least_errors(learners))
        omega_N = weight_N.flip(0).cumsum(0).flip(0)
        learner_S = torch.arange(s, device=self.c_KK.device) // self.width
        omega_S = omega_N[learner_S]
        omega_SS = omega_N[torch.maximum(learner_S[:, None], learner_S[None])]
        ridge_S = self.ridge_K[:s]
        a_SS = self.c_KK[:s, :s] * omega_SS + torch.diag(ridge_S * omega_S)
        return solve(a_SS, omega_S[:, None] * (self.cross_KO[:s] + ridge_S[:, None] * self.dense_KO[:s]))

    def bias(self, v_SO: Tensor) -> Tensor:
        """The bias [O] with which a prefix has the mean output of the whole."""
        return self.hidden.mean_output - self.hidden.mean_F[self.order[: len(v_SO)]] @ v_SO

    def padded(self, v_SO: Tensor) -> Tensor:
        """[O, N * H]; zeros where there is no neuron."""
        w = v_SO.new_zeros(v_SO.shape[1], self.learners * self.width)
        w[:, : len(v_SO)] = v_SO.T
        return w


def neuron_order(c_FF: Tensor, w_OF: Tensor, count: int) -> Tensor:
    """All neurons, best first: the first `count` by greedy selection, or all by variance in a very wide layer."""
    if c_FF.shape[0] > _WIDEST[c_FF.device.type]:
        return variance_order(c_FF, w_OF)
    return greedy_order(c_FF, w_OF, count)


def variance_order(c_FF: Tensor, w_OF: Tensor) -> Tensor:
    """Neurons by the variance that each contributes to the output, E[(h - mean)^2] |w|^2."""
    return (c_FF.diagonal() * w_OF.square().sum(0)).argsort(descending=True, stable=True)


def greedy_order(c_FF: Tensor, w_OF: Tensor, count: int) -> Tensor:
    """Neurons in the order of forward selection: each next one lowers the refitted error of y = w h the most.

    The error is that of a ridge regression of y on the neurons picked so far. `c_FF` is the covariance of h. The first
    `count` are selected, the rest follow by variance. Picks are made in blocks: the best candidates by their present
    gain, then one after the other among those, exactly.
    """
    ridge = RIDGE * usual_diagonal(c_FF)
    state = _Selection(c_FF, w_OF, ridge, count)
    while state.picked < count:
        state.pick_block()
    chosen = torch.zeros(len(c_FF), dtype=torch.bool, device=c_FF.device)
    first = torch.tensor(state.order, dtype=torch.long, device=c_FF.device)
    chosen[first] = True
    rest = variance_order(c_FF, w_OF)
    return torch.cat([first, rest[~chosen[rest]]])


class _Selection:
    """Covariances that are left once the picked neurons explain what they can.

    Of the covariance of the neurons only the diagonal is kept up to date, and the rows of the last block's candidates,
    which are likely to be candidates again; other rows follow from a growing Cholesky factor when they are asked for.
    """

    def __init__(self, c_FF: Tensor, w_OF: Tensor, ridge: Tensor, count: int) -> None:
        self.c_FF, self.ridge, self.count = c_FF, ridge, count
        self.order: list[int] = []
        self.diagonal_F = c_FF.diagonal() + ridge
        self.cross_FO = c_FF @ w_OF.T
        self.factor_PF = c_FF.new_empty(count, len(c_FF))
        self.free_F = torch.ones(len(c_FF), dtype=torch.bool, device=c_FF.device)
        # rows that are up to date, and the place of every neuron's among them, -1 for none
        self.recent_MF = c_FF[:0]
        self.place_F = torch.full((len(c_FF),), -1, device=c_FF.device)

    @property
    def picked(self) -> int:
        """Number of neurons picked so far."""
        return len(self.order)

    def pick_block(self) -> None:
        """Pick the next neurons and remove what they explain."""
        gain_F = torch.linalg.vector_norm(self.cross_FO, dim=1).square() / self.diagonal_F
        gain_F = torch.where(self.free_F, gain_F, -1.0)
        free = len(gain_F) - self.picked
        candidates = gain_F.topk(min(_CANDIDATES, free)).indices
        rows_MF = self._rows(candidates)
        wanted = min(_PICKS, self.count - self.picked, free)
        chosen = _greedy_few(rows_MF[:, candidates], self.cross_FO[candidates], wanted)
        picks = candidates[chosen]
        lower = cholesky(rows_MF[chosen][:, picks])
        block_PF = torch.linalg.solve_triangular(lower, rows_MF[chosen], upper=False)
        explained_PO = torch.linalg.solve_triangular(lower, self.cross_FO[picks], upper=False)
        self.factor_PF[self.picked : self.picked + wanted] = block_PF
        self.diagonal_F = (self.diagonal_F - block_PF.square().sum(0)).clamp_min(self.ridge / 2)
        self.cross_FO.addmm_(block_PF.T, explained_PO, alpha=-1)
        self.free_F[picks] = False
        self.order += picks.tolist()
        self.recent_MF = rows_MF.addmm_(block_PF[:, candidates].T, block_PF, alpha=-1)
        self.place_F.fill_(-1)[candidates] = torch.arange(len(candidates), device=candidates.device)

    def _rows(self, neurons: Tensor) -> Tensor:
        """Rows [M, F] of the covariance that is left, with the ridge."""
        place_M = self.place_F[neurons]
        is_new_M = place_M < 0
        new, known_PF = neurons[is_new_M], self.factor_PF[: self.picked]
        new_MF = self.c_FF[new]
        new_MF[torch.arange(len(new), device=new.device), new] += self.ridge
        rows_MF = self.c_FF.new_empty(len(neurons), len(self.c_FF))
        rows_MF[is_new_M] = new_MF.addmm_(known_PF[:, new].T, known_PF, alpha=-1)
        rows_MF[~is_new_M] = self.recent_MF[place_M[~is_new_M]]
        return rows_MF


def _greedy_few(c_MM: Tensor, cross_MO: Tensor, wanted: int) -> Tensor:
    """Forward selection among M candidates, one by one."""
    c_MM, cross_MO = c_MM.clone(), cross_MO.clone()
    left = torch.ones(len(c_MM), dtype=torch.bool, device=c_MM.device)
    floor = 1e-9 * mean_diagonal(c_MM)
    chosen: list[int] = []
    for _ in range(wanted):
        gain_M = cross_MO.square().sum(1) / c_MM.diagonal().clamp_min(floor)
        best = int(torch.where(left, gain_M, -1.0).argmax())
        chosen.append(best)
        left[best] = False
        column_M = c_MM[:, best] / c_MM[best, best].clamp_min(floor)
        cross_MO = cross_MO - torch.outer(column_M, cross_MO[best])
        c_MM = c_MM - torch.outer(column_M, c_MM[best].clone())
    return torch.tensor(chosen, dtype=torch.long, device=c_MM.device)
