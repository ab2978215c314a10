"""4-bit weights of learners, each rounded by what it multiplies in the tokens that run it (docs/semantics.md).

Shapes: T tokens, D in, O out, N learners, H learner width; columns C of a second layer are N * H, learner by learner.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.precision import float64_device
from acm_compiler.acm.quantized import int4, integers
from acm_compiler.acm.quantized.int4 import Grids
from acm_compiler.acm.reference import hidden, prefix_output
from acm_compiler.calibration.linear_algebra import solve
from acm_compiler.calibration.moments import Moments
from acm_compiler.calibration.quantized.inputs import Inputs
from acm_compiler.calibration.quantized.rounding import damped, round_rows

# least tokens of one k for a mean of their own; of fewer the mean is taken over all tokens
_FEW = 64
# part of the mean square of values that their moments may be wrong by
_ROUNDING = 1e-6


def rounded_learners(weights: Weights, inputs: Inputs) -> Weights:
    """The same learners with 4-bit weights that lose as little as can be on these tokens, and biases to match.

    First layers are rounded by the second moments of the input, second layers by those of the hidden values that the
    rounded first layers give, of the learners that each token runs: what a token leaves out counts nothing for it, so
    that every k stays as good as it can. Biases make the mean output of every k that of the floats.
    """
    x_TD, k_T = inputs.x, inputs.k.long()
    floats = _in_float32(weights)
    made = integers.quantized(floats, "int4")  # to nearest; what data decide takes the place of that
    made = _with_first_layers(floats, made, x_TD, k_T)
    made = _with_second_layers(floats, made, x_TD, k_T)
    b_out = floats.b_out.clone()
    rounded = integers.dequantized(made)
    for k in range(1, weights.learners + 1):
        own_TD = x_TD[k_T == k] if int((k_T == k).sum()) >= _FEW else x_TD
        b_out[k] += (prefix_output(own_TD, floats, k) - prefix_output(own_TD, rounded, k)).mean(0)
    fitted = {"b_in": made.b_in, "b_up": made.b_up, "b_out": b_out}
    biases: dict[str, Any] = {name: bias.to(weights.b_out) for name, bias in fitted.items() if bias is not None}
    return replace(made, **biases)


def _in_float32(weights: Weights) -> Weights:
    tensors: dict[str, Any] = weights.tensors._asdict()
    changed: dict[str, Any] = {name: t.detach().float() for name, t in tensors.items() if t is not None}
    return replace(weights, **changed)


def _with_first_layers(floats: Weights, made: Weights, x_TD: Tensor, k_T: Tensor) -> Weights:
    """`made` with the layers rounded that read a token's input whole, or, slices of it, a learner's part of it."""
    if floats.form == "cols":
        width = floats.w_in[0, 0].numel()
        x_TC = x_TD.unflatten(1, (floats.w_in.shape[2], floats.learners, -1)).movedim(1, 2).flatten(1)
        rows_ONGh = floats.w_in.movedim(0, 1)
        q, grids = _rounded(rows_ONGh.flatten(1), _shared_moments(x_TC, k_T, width), parts=floats.learners)
        q_NOGh = q.view_as(rows_ONGh).movedim(1, 0)
        by_learner = Grids(*(t.unflatten(1, (floats.learners, -1)).movedim(1, 0) for t in grids))
        w_in, s_in = int4.pack(q_NOGh, by_learner)
        return replace(made, w_in=w_in, s_in=s_in)
    moments = Moments()
    moments.add(x_TD)
    centred = floats.form == "rows" or floats.b_in is not None
    c_DD = damped(moments.covariance if centred else moments.spread_around(torch.zeros_like(moments.mean)))
    layers = [name for name in ("w_in", "w_up") if getattr(floats, name) is not None]
    rows = [getattr(floats, name).flatten(0, -2) for name in layers]
    q, grids = _rounded(torch.cat(rows), c_DD)
    changed: dict[str, Any] = {}
    for name, q_RD, *of_rows in zip(layers, *(t.chunk(len(layers)) for t in (q, *grids)), strict=True):
        weight, part = getattr(floats, name), name.removeprefix("w_")
        values, scales = int4.pack(q_RD.view_as(weight), Grids(*(t.unflatten(0, weight.shape[:-1]) for t in of_rows)))
        changed |= {name: values, f"s_{part}": scales}
        bias = getattr(floats, f"b_{part}")
        if bias is not None:
            off = weight - int4.dequantize_weight(values, scales)
            changed[f"b_{part}"] = bias + off @ moments.mean.to(off)
    return replace(made, **changed)


def _with_second_layers(floats: Weights, made: Weights, x_TD: Tensor, k_T: Tensor) -> Weights:
    """`made` with the layers rounded that read hidden values, and the dense weight that k = N runs."""
    changed: dict[str, Any] = {}
    n = floats.learners
    if floats.w_out is not None:
        h_TC = hidden(x_TD, integers.dequantized(made), n)
        lost_TC = hidden(x_TD, floats, n) - h_TC
        if floats.w_out.dim() == 3:
            changed["w_out"], changed["s_out"] = _second_layer(floats.w_out, h_TC, lost_TC, k_T)
        elif made.w_out is not None and made.s_out is not None:
            changed["w_out"], changed["s_out"] = made.w_out.clone(), made.s_out.clone()
            for k in range(1, n + 1):
                layer = _second_layer(floats.w_out[k - 1, :, :k], h_TC, lost_TC, torch.full_like(k_T, k))
                changed["w_out"][k - 1, :, :k], changed["s_out"][k - 1, :, :k] = layer
        if floats.w_top is not None and floats.form != "linear":
            w_ONH = floats.w_top.unflatten(1, (n, -1))
            values, scales = _second_layer(w_ONH, h_TC, lost_TC, torch.full_like(k_T, n))
            changed["w_top"], changed["s_top"] = values.flatten(1), scales.flatten(1, 2)
    if floats.w_top is not None and floats.form == "linear":
        changed["w_top"], changed["s_top"] = int4.pack(*_rounded(floats.w_top, damped(_covariance(x_TD))))
    return replace(made, **changed)


def _second_layer(w_ONH: Tensor, h_TC: Tensor, lost_TC: Tensor, k_T: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of a second layer that some learners share, for hidden values h that lost something before.

    First the floats W' are found that come nearest to the output W (h + lost), by least squares; these are rounded.
    """
    _, n, width = w_ONH.shape
    w_OC, columns = w_ONH.flatten(1), n * width
    c_CC = _shared_moments(h_TC[:, :columns], k_T, width)
    missing_CO = c_CC.new_zeros(columns, len(w_OC))
    for k in k_T.unique().tolist():
        of_T, used = k_T == k, slice(int(k) * width)
        lost_TO = lost_TC[of_T, used] @ w_OC[:, used].T
        missing_CO[used] += (h_TC[of_T, used].T @ (lost_TO - lost_TO.mean(0)) / len(k_T)).to(c_CC)
    fitted_OC = w_OC.to(c_CC) + solve(c_CC, missing_CO).T
    q_OC, grids = _rounded(fitted_OC, c_CC, parts=n)
    by_learner = Grids(*(t.unflatten(1, (n, -1)) for t in grids))
    return int4.pack(q_OC.view_as(w_ONH), by_learner)


def _rounded(w_RC: Tensor, c_CC: Tensor, *, parts: int = 1) -> tuple[Tensor, Grids]:
    """Integers and grids on the weight's device."""
    made = round_rows(w_RC.to(c_CC), c_CC, parts=parts)
    return made.q.to(w_RC), Grids(*(t.to(w_RC) for t in made.grids))


def _covariance(v_TC: Tensor) -> Tensor:
    moments = Moments()
    moments.add(v_TC)
    return moments.covariance


def _shared_moments(v_TC: Tensor, k_T: Tensor, width: int) -> Tensor:
    """Moments of what a layer reads that all k share: a token's values of the first k learners, around the mean of k.

    Biases, one for each k, take up what is the same for all its tokens. Can be inverted.
    """
    columns = v_TC.shape[1]
    c_CC = torch.zeros(columns, columns, dtype=torch.float64, device=float64_device(v_TC.device))
    for k in k_T.unique().tolist():
        of_T = k_T == k
        if k:
            used = slice(int(k) * width)
            c_CC[used, used] += _covariance(v_TC[of_T, used]) * of_T.double().mean().to(c_CC)
    # products of float32, of which values that hardly vary leave nothing but rounding
    return damped(c_CC, rounding=_ROUNDING * float(v_TC.double().square().mean()))
