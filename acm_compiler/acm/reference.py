"""The computation of an ACM in plain torch: the meaning that kernels, costs and tests defer to.

The equations: docs/semantics.md, The module.

Shapes: T tokens, D in, O out, N learners, H learner width, C = N - k_min + 1 gate columns.
`k` is how many learners a token runs, `n` one learner's index, `c` a gate column; k = k_min + c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.activations import resolve
from acm_compiler.acm.arguments import Weights, require_range
from acm_compiler.acm.precision import float64_device
from acm_compiler.acm.quantized import integers

GateRule = Literal["logits", "damage"]
"""Meaning of a gate's score; `utilities` and `priced_errors` have the equations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over a token's D features: LayerNorm, or RMSNorm where not `centred`; weight and bias [D] or absent."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool = True


def normalised(x_TD: Tensor, norm: Norm) -> Tensor:
    """The tokens as the norm gives them, [T, D]."""
    if norm.centred:
        return F.layer_norm(x_TD, x_TD.shape[-1:], norm.weight, norm.bias, norm.eps)
    y_TD = F.rms_norm(x_TD, x_TD.shape[-1:], norm.weight, norm.eps)
    return y_TD if norm.bias is None else y_TD + norm.bias


def hidden(x_TD: Tensor, weights: Weights, k: int) -> Tensor:
    """Hidden activations [T, k * H] of the first k learners."""
    h_TH = resolve(weights.act)(_in_layer(x_TD, weights.w_in, weights.s_in, weights.b_in, k))
    if weights.w_up is not None:
        h_TH = h_TH * _in_layer(x_TD, weights.w_up, weights.s_up, weights.b_up, k)
    return h_TH


def _in_layer(x_TD: Tensor, w_NHD: Tensor, s_NH: Tensor | None, b_NH: Tensor | None, k: int) -> Tensor:
    s_H, b_H = (None if tensor is None else tensor.flatten(0, 1)[: k * tensor.shape[1]] for tensor in (s_NH, b_NH))
    return _linear(x_TD, w_NHD.flatten(0, 1)[: k * w_NHD.shape[1]], s_H, b_H)


def _linear(x_TD: Tensor, w_OD: Tensor, s_O: Tensor | None, b_O: Tensor | None, parts: int = 1) -> Tensor:
    """x w^T + b; of integers with scales s each of so many equal parts of a row of x is quantised by itself."""
    if s_O is None:
        return F.linear(x_TD, w_OD, b_O)
    y_TO = integers.linear(x_TD, w_OD, s_O, parts)
    return y_TO if b_O is None else y_TO + b_O.float()


def prefix_output(x_TD: Tensor, weights: Weights, k: int) -> Tensor:
    """y_k(x) [T, O]: what tokens get that all run k learners; k = 0 adds b_out(0) only."""
    b_O = weights.b_out[k]
    if k == 0:
        return b_O.to(x_TD.dtype).expand(x_TD.shape[0], -1)
    if not weights.is_quantized:
        return _prefix_sums(x_TD, weights, k)
    # products of integers are computed from and to float32; what surrounds them stays in caches
    blocks = (_prefix_sums(x_BD.float(), weights, k).to(x_TD.dtype) for x_BD in x_TD.split(integers.BLOCK))
    return torch.cat(list(blocks))


def _prefix_sums(x_TD: Tensor, weights: Weights, k: int) -> Tensor:
    w, b_O = weights, weights.b_out[k]
    if w.form == "rows":
        heads, width = w.w_in.shape[1:3]
        s_R = None if w.s_in is None else w.s_in[:k].movedim(0, 1).flatten(0, 2)
        y_TR = _linear(x_TD, w.w_in[:k].movedim(0, 1).flatten(0, 2), s_R, None)  # head by head
        if k < w.learners:
            y_TR = F.pad(y_TR.unflatten(1, (heads, -1)), (0, (w.learners - k) * width)).flatten(1)
        return y_TR + b_O
    if w.form == "cols" and not w.is_quantized:
        x_TGR = x_TD.unflatten(1, (w.w_in.shape[2], -1))[..., : k * w.w_in.shape[3]]
        return F.linear(x_TGR.flatten(1), w.w_in[:k].permute(1, 2, 0, 3).flatten(1), b_O)
    if w.form == "cols":
        x_TNGh = _slices_of_input(x_TD, w)[:, :k]
        s_O = w.s_in[:k].movedim(0, 1).flatten(1, 2) if w.s_in is not None and w.is_int4 else w.s_in
        return _linear(x_TNGh.flatten(1), w.w_in[:k].movedim(0, 1).flatten(1), s_O, b_O, parts=k)
    if k == w.learners and w.w_top is not None:
        if w.form == "linear":
            return _linear(x_TD, w.w_top, w.s_top, b_O)
        return _linear(hidden(x_TD, w, k), w.w_top, w.s_top, b_O, parts=k)
    s_O = w.s_out[k - 1] if w.s_out is not None and w.w_out is not None and w.w_out.dim() == 4 else w.s_out
    if s_O is not None and w.is_int4:
        s_O = s_O[:, :k].flatten(1, 2)
    return _linear(hidden(x_TD, w, k), out_layer(w, k), s_O, b_O, parts=k)


def out_layer(weights: Weights, k: int) -> Tensor:
    """The second layer [O, k * H] of the prefix k; a view."""
    assert weights.w_out is not None
    w_ONH = weights.w_out[k - 1] if weights.w_out.dim() == 4 else weights.w_out
    return w_ONH.flatten(1)[:, : k * w_ONH.shape[2]]


def _slices_of_input(x_TD: Tensor, weights: Weights) -> Tensor:
    """The input as [T, N, G, h], what each learner reads; a view."""
    return x_TD.unflatten(1, (weights.w_in.shape[2], weights.learners, -1)).movedim(1, 2)


def all_outputs(x_TD: Tensor, weights: Weights, k_min: int) -> Tensor:
    """y_k(x) for every k from k_min to N, [C, T, O]."""
    last = weights.learners
    if weights.w_out is not None and weights.w_out.dim() == 4:
        return torch.stack([prefix_output(x_TD, weights, k) for k in range(k_min, last + 1)])
    s_NTO = learner_outputs(x_TD, weights)
    sums = torch.cat([torch.zeros_like(s_NTO[:1]), s_NTO.cumsum(0)])
    y_CTO = (sums + weights.b_out[:, None].to(sums.dtype))[k_min:]
    if weights.w_top is None:
        return y_CTO
    return torch.cat([y_CTO[:-1], prefix_output(x_TD, weights, last)[None]])


def learner_outputs(x_TD: Tensor, weights: Weights) -> Tensor:
    """s_n(x) of each learner alone, [N, T, O]; where all k but N share one second layer."""
    if weights.form == "rows":
        heads, width = weights.w_in.shape[1:3]
        n_N = torch.arange(weights.learners, device=x_TD.device)
        owner_O = n_N[None, :, None].expand(heads, -1, width).flatten()
        y_TO = F.linear(x_TD, weights.w_in.movedim(0, 1).flatten(0, 2))
        return y_TO * (owner_O == n_N[:, None])[:, None]
    if weights.form == "cols":
        return torch.einsum("tngh,nogh->nto", _slices_of_input(x_TD, weights), weights.w_in)
    assert weights.w_out is not None
    h_TNH = hidden(x_TD, weights, weights.learners).unflatten(-1, weights.w_in.shape[:2])
    return torch.einsum("tnh,onh->nto", h_TNH, weights.w_out)


def run_learners(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """y_{k(t)}(x_t) [T, O]; token t runs its first k(t) learners and nothing more is computed for it.

    Weights that no token runs have gradients of zeros. UsageError for a k outside [0, N].
    """
    rows_of_k = [torch.nonzero(k_T == k).flatten() for k in range(weights.learners + 1)]
    if sum(rows.numel() for rows in rows_of_k) != k_T.numel():
        require_range(int(k_T.min()), int(k_T.max()), weights.learners)
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in weights.tensors)
    least = weights.learners - 1 if trained else weights.learners + 1  # the last two k read all weights
    parts = [prefix_output(x_TD[rows], weights, k) for k, rows in enumerate(rows_of_k) if rows.numel() or k >= least]
    if len(parts) <= 1:
        return parts[0].contiguous() if parts else x_TD.new_empty(0, weights.b_out.shape[1])
    y_TO = torch.cat(parts)
    in_order = any(rows.numel() == k_T.numel() for rows in rows_of_k)
    return y_TO if in_order else y_TO[torch.cat(rows_of_k).argsort()]


def relaxed_output(x_TD: Tensor, nu_TC: Tensor, weights: Weights, k_min: int) -> Tensor:
    """y = sum_c nu_c b_out(k(c)) + sum_n m_n s_n(x) with m_n = sum of nu_c over k(c) > n, [T, O].

    With `nu` one-hot in value and soft in gradient this is the straight-through output: the loss reaches the gate
    through every m_n and through b_out.
    """
    m_TN = learner_mass(nu_TC, weights.learners, k_min).to(x_TD.dtype)
    if weights.w_out is not None and not weights.is_nested:
        return torch.einsum("tc,cto->to", nu_TC, all_outputs(x_TD, weights, k_min))
    if weights.w_out is None:
        y_TO = _weighed_slices(x_TD, m_TN, weights)
    else:
        h_TNH = hidden(x_TD, weights, weights.learners).unflatten(-1, weights.w_in.shape[:2])
        y_TO = F.linear((h_TNH * m_TN[..., None]).flatten(1), weights.w_out.flatten(1))
    return y_TO + (nu_TC @ weights.b_out[k_min:].to(nu_TC.dtype)).to(y_TO.dtype)


def branchless_output(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """`run_learners` without looking at k: everything is computed for every token, and what is not run counts zero."""
    chosen_TC = k_T[..., None] == torch.arange(weights.learners + 1, device=k_T.device)
    return relaxed_output(x_TD, chosen_TC.to(x_TD.dtype), weights, 0)


def _weighed_slices(x_TD: Tensor, m_TN: Tensor, weights: Weights) -> Tensor:
    """sum_n m_n s_n(x) of slices, [T, O]."""
    if weights.form == "rows":
        w_GNhD = weights.w_in.movedim(0, 1)
        y_TGNh = F.linear(x_TD, w_GNhD.flatten(0, 2)).unflatten(1, w_GNhD.shape[:3])
        return (y_TGNh * m_TN[:, None, :, None]).flatten(1)
    x_TNGh = _slices_of_input(x_TD, weights) * m_TN[..., None, None]
    return F.linear(x_TNGh.flatten(1), weights.w_in.movedim(0, 1).flatten(1))


def learner_mass(nu_TC: Tensor, n_learners: int, k_min: int) -> Tensor:
    """m_n = sum of nu_c over the columns whose k exceeds n, [T, N]."""
    k_C = torch.arange(k_min, n_learners + 1, device=nu_TC.device)
    n_N = torch.arange(n_learners, device=nu_TC.device)
    return nu_TC @ (k_C[:, None] > n_N[None, :]).to(nu_TC.dtype)


def utilities(score_TC: Tensor, knob: Tensor, cost_C: Tensor, rule: str) -> Tensor:
    """The utility of each choice, [T, C], in fp32 (float64 for float64 scores) (docs/semantics.md, Gate and knob).

    rule "damage": scores o are log expected damages, knob is log lambda, u = -logaddexp(o, knob + log c_k).
    rule "logits": scores are the paper's logits, knob is lambda, u = logit - lambda c_k.
    `knob` is a scalar or [T]; `cost_C` the cost of each choice in units of the mean site's learner.
    """
    score_TC = score_TC if score_TC.dtype == torch.float64 else score_TC.float()
    knob = knob.to(score_TC.dtype)[..., None]
    cost_C = cost_C.to(score_TC)
    if rule == "damage":
        return -torch.logaddexp(score_TC, knob + cost_C.log())
    return score_TC - knob * cost_C


def priced_errors(score_TC: Tensor, rule: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Errors e [T, C] of which gates choose argmin_k e_k + lambda c_k, and the knobs of prices lambda [T, M]."""
    if rule == "damage":
        scale_T1 = score_TC.amax(1, keepdim=True)  # without it exp may overflow
        return (score_TC - scale_T1).exp(), lambda price_TM: price_TM.clamp_min(0).log() + scale_T1
    return -score_TC, lambda price_TM: price_TM


def choice_costs(cost: float, *, k_min: int, n_learners: int, device: torch.device) -> Tensor:
    """c_k of every choice for tokens on `device`, float64 [C]: k times a site's cost of one learner."""
    return torch.arange(k_min, n_learners + 1, device=float64_device(device), dtype=torch.float64) * cost


def choose_k(u_TC: Tensor, k_lo: Tensor, k_hi: Tensor, k_min: int) -> Tensor:
    """argmax of the utilities over k in [k_lo, k_hi], ties to the smaller k; int32 [T].

    A token with a NaN among the utilities of these k runs k_hi. `k_lo` and `k_hi` are scalars or [T]; the bounds hold
    as far as the k in [k_min, N] allow, k_hi before k_lo.
    """
    most = k_hi.clamp(k_min, k_min + u_TC.shape[1] - 1)
    least = torch.minimum(k_lo.clamp(min=k_min), most)
    k_C = torch.arange(k_min, k_min + u_TC.shape[1], device=u_TC.device)
    allowed = (k_C >= least[..., None]) & (k_C <= most[..., None])
    u_TC = torch.where(allowed, u_TC, -torch.inf)
    best_T = torch.where(u_TC.isnan().any(-1), most, u_TC.argmax(-1) + k_min)
    return best_T.clamp(least, most).to(torch.int32)


def sample_nu(u_TC: Tensor, noise_TC: Tensor, temperature: float) -> Tensor:
    """Gumbel-softmax sample with straight-through gradient, [T, C]: one-hot in value, softmax in gradient."""
    soft_TC = ((u_TC + noise_TC) / temperature).softmax(-1)
    hard_TC = torch.zeros_like(soft_TC).scatter_(-1, soft_TC.max(-1, keepdim=True).indices, 1.0)
    return hard_TC - soft_TC.detach() + soft_TC
