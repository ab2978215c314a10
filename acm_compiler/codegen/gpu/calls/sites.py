"""A whole ACM run from the kept plans of its gate and its learners, without the operators' dispatch and lookups.

For eager calls that nothing observes, with gradients of the learners or without. The first call of a kind takes the
usual way, through the operators, which keep their plans; the second puts them together. Where all tokens run one k,
and nothing is differentiated, there is nothing to choose or to sort: dense products of the first learners do, or of one
token its kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.context import is_nothing_open, is_plain_call
from acm_compiler.acm.gradients.sorted_tokens import pays
from acm_compiler.acm.intact import refuse_changed, refuse_idle
from acm_compiler.acm.learners import OnlyK
from acm_compiler.acm.ops import is_vector_call
from acm_compiler.acm.reference import prefix_output
from acm_compiler.acm.tokens import is_one_each
from acm_compiler.codegen.gpu.calls.kept import ALIGNED, addresses_of, find_plan, rounding
from acm_compiler.codegen.gpu.calls.operators import gate_kind, learners_kind, on_device_of
from acm_compiler.codegen.gpu.calls.operators import learners as learn
from acm_compiler.codegen.gpu.gradients.rule import differentiated
from acm_compiler.codegen.gpu.tiles import bucket_of


class _Site:
    """An ACM's modules, parameters and buffers when its plans were put together, and the plans by kind of call."""

    __slots__ = ("acm", "addresses", "modules", "parameters", "plans", "rule")

    def __init__(self, acm: ACM) -> None:
        number = id(acm)
        self.acm = weakref.ref(acm, lambda _: _SITES.pop(number, None))
        self.modules, self.parameters = _parts(acm)
        self.addresses = addresses_of(self.parameters)
        self.plans: dict[Hashable, Any] = {}  # of gate and learners, or of one token's learners
        self.rule = acm.gate.rule, acm.cost

    def holds(self, acm: ACM) -> bool:
        """True if nothing was replaced or moved."""
        modules, parameters = _parts(acm)
        return (
            self.acm() is acm
            and all(map(is_, modules, self.modules))
            and len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and self.addresses == addresses_of(parameters)
            and self.rule == (modules[0].rule, acm.cost)
        )


_SITES: dict[int, _Site] = {}


def run_site(acm: ACM, x: Tensor) -> Tensor | None:
    """y [..., O] of an input [..., D]; None where the call must go the usual way."""
    if not _is_plain(acm, x):
        return None
    shape, is_decode = x.shape, is_one_each(x.shape[:-1], acm.axis_of_ones)
    tokens = x.numel() // shape[-1]
    if not acm.only_k.is_of(acm.__dict__["_buffers"]):
        if torch.cuda.is_current_stream_capturing():  # which may not wait for the device; a gate reads what is there
            return None
        _read_bounds(acm)
    k = acm.only_k.of(is_decode=is_decode)
    learns, x_TD = torch.is_grad_enabled(), x.view(tokens, shape[-1])
    if k is not None and not learns:
        k_T = _k_of_one(acm, k, is_decode) if k and tokens == 1 else None
        y_TO = _prefix(acm, x_TD, k) if k_T is None else _one(acm, x_TD, k_T, k)
        return None if y_TO is None else y_TO.view(*shape[:-1], -1)
    kind = _kind_of(x_TD, is_decode)
    site = _site_of(acm)
    plans, scalars = site.plans.get(kind), _scalars(acm, is_decode)
    if plans is None:
        found = _kept_plans(acm, x_TD, scalars)
        if None not in found:
            site.plans[kind] = found
        return None
    with on_device_of(x):
        k_T, histogram = plans[0](x_TD, *scalars)
        order = plans[1].order(k_T, histogram, x_TD)
        if learns:
            y_TO = differentiated(plans[1], order, x_TD, k_T, acm.learners.weights())
        else:
            y_TO = plans[1](x_TD, k_T, None, order)
    return y_TO if len(shape) == 2 else y_TO.view(*shape[:-1], -1)


def _read_bounds(acm: ACM) -> None:
    """Read, from the device, the choices that something else than `set_choices` has written or put there."""
    acm.written = acm.run_time()
    acm.only_k = OnlyK(acm.written, acm.within, acm._buffers)


def _kind_of(x_TD: Tensor, *facts: Hashable) -> Hashable:
    """The kind of a call of such contiguous rows."""
    dtype, place = x_TD.dtype, x_TD.data_ptr() & ALIGNED
    return bucket_of(x_TD.shape[0]), x_TD.shape[1], dtype, x_TD.get_device(), place, rounding(dtype), *facts


def _site_of(acm: ACM) -> _Site:
    """Plans and parts of an ACM, kept anew where something was replaced."""
    site = _SITES.get(id(acm))
    if site is None or not site.holds(acm):
        site = _SITES[id(acm)] = _Site(acm)
    return site


def _prefix(acm: ACM, x_TD: Tensor, k: int) -> Tensor | None:
    """The first k learners of every token: dense products on views of the weights; no gate, and nothing is sorted."""
    weights = _weights_for(acm, x_TD)
    return None if weights is None else _products(x_TD, weights, k)


def _products(x_TD: Tensor, weights: Weights, k: int) -> Tensor:
    y_TO = prefix_output(x_TD, weights, k)
    return y_TO if k else y_TO.contiguous()  # of k = 0 it is one row for all tokens, which others may write to


def _weights_for(acm: ACM, x_TD: Tensor) -> Weights | None:
    """The learners' weights; None where such a call must go the usual way."""
    gate, learners = acm.gate, acm.learners
    refuse_changed(acm.name, (gate.inner, gate.outer), learners)
    weights = learners.weights()
    fits = not weights.is_quantized and x_TD.dtype == weights.b_out.dtype and x_TD.shape[1] == acm.d_in
    return weights if fits else None


def _k_of_one(acm: ACM, k: int, is_decode: bool) -> Tensor | None:
    """The lower bound as one token's k, on the device; None where a host wrote one that is out of reach.

    A CUDA graph gets a tensor of its own: it keeps its k, as graphs of dense products do, whatever is written later.
    """
    name = "decode_k_lo" if is_decode else "k_lo"
    bound = acm.__dict__["_buffers"][name].view(1)
    if torch.cuda.is_current_stream_capturing():
        return torch.full_like(bound, k)
    return bound if acm.written[name] == k else None


def _one(acm: ACM, x_TD: Tensor, k_T: Tensor, k: int) -> Tensor | None:
    """The first k learners of one token, by its kernels where it has any."""
    kind = _kind_of(x_TD, "one k", k_T.data_ptr() & ALIGNED)
    site = _site_of(acm)
    plan = site.plans.get(kind)
    if plan is not None:
        with on_device_of(x_TD):
            return plan(x_TD, k_T, None)
    weights = _weights_for(acm, x_TD)
    if weights is None:
        return None
    if not is_vector_call(x_TD, weights):
        return _products(x_TD, weights, k)
    y_TO = learn(x_TD, k_T, *weights.tensors, form=weights.form, act=weights.act)
    found = find_plan(weights.tensors, learners_kind(x_TD, k_T, None, weights.form, weights.act))
    if found is not None:
        site.plans[kind] = found
    return y_TO


def _is_plain(acm: ACM, x: Tensor) -> bool:
    """True if the call is gate and learners alone: no tap, adapter, observer, relaxed choice, dropout or transform.

    Gradients there may be, of learners that share one second layer.
    """
    if type(acm) is not ACM:  # another kind may choose by other rules
        return False
    own = all(part is None for part in (acm.tap, acm.adapter, acm.split, acm.skips)) and acm.state == "learners"
    if acm.training and (acm.temperature is not None or acm.dropout):
        return False
    if not own or acm.__dict__["_buffers"]["counts"] is not None or not is_nothing_open():
        return False
    if not (type(x) is Tensor and x.ndim > 1 and x.numel() > 0 and x.is_contiguous() and is_plain_call(x)):
        return False
    return not torch.is_grad_enabled() or _has_gradients(acm, x)


def _has_gradients(acm: ACM, x: Tensor) -> bool:
    """True if kernels pay for learners that may have gradients; refuses what a step would leave out."""
    if acm.training:
        refuse_idle(acm)
    return pays(x.view(-1, x.shape[-1]), acm.learners.weights())


def _kept_plans(acm: ACM, x_TD: Tensor, scalars: tuple[Tensor, ...]) -> tuple[Any, Any]:
    gate, weights = acm.gate, acm.learners.weights()
    kind = gate_kind(x_TD, scalars, cost=acm.cost, k_min=acm.k_min, rule=gate.rule)
    of_learners = learners_kind(x_TD, None, None, weights.form, weights.act)
    return find_plan(gate.weights(), kind), find_plan(weights.tensors, of_learners)


def _parts(acm: ACM) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    modules = acm.__dict__["_modules"]
    gate, learners = modules["gate"], modules["learners"]
    layers = gate.__dict__["_modules"]
    inner, outer = layers["inner"], layers["outer"]
    parts: tuple[nn.Module, ...] = gate, learners, inner, outer
    return parts, [tensor for part in parts[1:] for tensor in part.__dict__["_parameters"].values()]


def _scalars(acm: ACM, is_decode: bool) -> tuple[Tensor, Tensor, Tensor]:
    """knob, k_lo and k_hi; of the knob its bits, which a kernel reads as they are."""
    buffers = acm.__dict__["_buffers"]
    if is_decode:
        return buffers["decode_knob"].view(torch.float32), buffers["decode_k_lo"], buffers["decode_k_hi"]
    return buffers["knob"].view(torch.float32), buffers["k_lo"], buffers["k_hi"]
