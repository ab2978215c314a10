"""Learners and their gradients over tokens sorted by k: every product is dense, and of no token that does not run it.

Sorted by k the tokens that run exactly k learners are neighbours, a band, and every product is one of a band. Where
dense layers take 6 N products forward and backward, tokens of k learners take 6 k; 2 N + 4 k with the exact gradient of
a relaxed choice, which needs every learner's first layer and what reaches it. Shapes: see `reference`; M = N * H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.acm.activations import resolve
from acm_compiler.acm.arguments import LearnerWeights, Weights, require_range
from acm_compiler.acm.reference import out_layer, relaxed_output, run_learners

# hidden values of a call, T * M, from which on sorting pays, on a CPU; on an H100 it does from 3e7 at the latest
_LEAST = 1 << 20


class Band(NamedTuple):
    """Sorted rows that run q learners."""

    rows: slice
    q: int


class Order(NamedTuple):
    """Tokens by k, descending: the permutation and its inverse (None: as they are), and the bands."""

    perm: Tensor | None
    inverse: Tensor | None
    bands: list[Band]

    def sort(self, values: Tensor) -> Tensor:
        """Rows of tokens in this order."""
        return values if self.perm is None else values.index_select(0, self.perm)

    def unsort(self, bands: Sequence[Tensor]) -> Tensor:
        """Rows of bands in the order of tokens."""
        values = bands[0] if len(bands) == 1 else torch.cat(list(bands))
        return values if self.inverse is None else values.index_select(0, self.inverse)


def order_of(k_T: Tensor, learners: int) -> Order:
    """The order of tokens, by one sort and one look at how many run each learner. UsageError for a k outside [0, N]."""
    tokens = k_T.numel()
    if not tokens:
        return Order(None, None, [Band(slice(0), 0)])
    runs_NT = k_T > torch.arange(learners, device=k_T.device)[:, None]
    low, high, *counts = torch.stack([k_T.min().long(), k_T.max().long(), *runs_NT.sum(1)]).tolist()
    require_range(low, high, learners)
    edges = pairwise([0, *reversed(counts), tokens])
    bands = [Band(slice(a, b), learners - place) for place, (a, b) in enumerate(edges) if a < b]
    if low == high:
        return Order(None, None, bands)
    perm = k_T.argsort(descending=True, stable=True)
    return Order(perm, torch.empty_like(perm).index_copy_(0, perm, torch.arange(tokens, device=perm.device)), bands)


def pays(x_TD: Tensor, weights: Weights) -> bool:
    """True for learners that share one second layer, of floats, and where what is left out costs more than sorting."""
    if not weights.is_nested or weights.is_quantized or x_TD.is_meta or type(x_TD) not in (Tensor, nn.Parameter):
        return False
    values = x_TD.shape[0] * weights.learners * weights.w_in.shape[1]
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # there already when this is traced

        return guard_or_false(values >= _LEAST)
    return values >= _LEAST


def sorted_output(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """`run_learners`, with these gradients."""
    return _Learners.apply(x_TD, k_T, None, 0, weights.act, weights.form, *weights.tensors)


def sorted_relaxed(x_TD: Tensor, nu_TC: Tensor, weights: Weights, k_min: int) -> Tensor:
    """`relaxed_output` of a nu that is one-hot in value, with these gradients."""
    k_T = chosen(nu_TC, k_min)
    return _Learners.apply(x_TD, k_T, nu_TC, k_min, weights.act, weights.form, *weights.tensors)


def chosen(nu_TC: Tensor, k_min: int) -> Tensor:
    """k of every token, [T], where nu is one-hot in value."""
    return nu_TC.detach().argmax(-1) + k_min


class _Learners(torch.autograd.Function):
    """y [T, O]; nu is None where k has no gradient."""

    @staticmethod
    def forward(ctx, x_TD, k_T, nu_TC, k_min, act, form, *tensors):  # type: ignore[override]
        weights = Weights(*tensors, act=act, form=form)
        order = order_of(k_T, weights.learners)
        bands = bands_of_hidden(order, weights, every=nu_TC is not None and ctx.needs_input_grad[2])
        xs_TD = order.sort(x_TD)
        hidden = [activated(first_layer(xs_TD, band, weights), weights) for band in bands]
        ctx.save_for_backward(x_TD, k_T, nu_TC, xs_TD, *tensors, *(tensor for made in hidden for tensor in made))
        ctx.order, ctx.bands, ctx.k_min, ctx.options = order, bands, k_min, {"act": act, "form": form}
        return second_layer(hidden, weights, order)

    @staticmethod
    def backward(ctx, dy_TO):  # type: ignore[override]
        x_TD, k_T, nu_TC, xs_TD, *rest = ctx.saved_tensors
        count, wants = len(LearnerWeights._fields), ctx.needs_input_grad
        weights = Weights(*rest[:count], **ctx.options)
        if torch.is_grad_enabled():  # these gradients are to be differentiated
            return _by_reference(ctx, dy_TO, x_TD, k_T, nu_TC, weights)
        each = (len(rest) - count) // len(ctx.bands)
        hidden = [rest[at : at + each] for at in range(count, len(rest), each)]
        wanted = {name for name, wants_it in zip(LearnerWeights._fields, wants[6:], strict=True) if wants_it}
        found = gradients(
            dy_TO,
            xs_TD,
            hidden,
            weights,
            ctx.order,
            wanted | ({"x"} if wants[0] else set()),
            choice=(nu_TC.dtype, ctx.k_min) if nu_TC is not None and wants[2] else None,
        )
        of_weights = (found.get(name) for name in LearnerWeights._fields)
        return found.get("x"), None, found.get("nu"), None, None, None, *of_weights


def gradients(
    dy_TO: Tensor,
    xs_TD: Tensor,
    hidden: Sequence[Sequence[Tensor]],
    weights: Weights,
    order: Order,
    wanted: set[str],
    *,
    choice: tuple[torch.dtype, int] | None = None,
) -> dict[str, Tensor]:
    """Gradients by name: of x, of weights, and of nu where a choice, its type and k_min, has one.

    xs: x in order; hidden: what `activated` gave, of each band or, for a choice, of all rows and learners.
    """
    bands = bands_of_hidden(order, weights, every=choice is not None)
    dys_TO = order.sort(dy_TO)
    dh = [dys_TO[rows] @ out_layer(weights, q) for rows, q in bands]
    made = [torch.autograd.grad(h, of, g, retain_graph=True) for (*of, h), g in zip(hidden, dh, strict=True)]
    branches = [_per_band(branch, weights, order) for branch in zip(*made, strict=True)]
    h = [part[-1].detach() for part in hidden]
    found = _of_weights(xs_TD, dys_TO, [_per_band(h, weights, order), *branches], weights, order, wanted)
    if "x" in wanted:
        found["x"] = _of_tokens(branches, weights, order)
    if choice is not None:
        dtype, k_min = choice
        reach_TN = (h[0] * dh[0]).unflatten(1, (weights.learners, -1)).sum(-1, dtype=dtype)
        of_bias_TK = dys_TO.to(dtype) @ weights.b_out.to(dtype).T
        found["nu"] = order.unsort([(F.pad(reach_TN.cumsum(1), (1, 0)) + of_bias_TK)[:, k_min:]])
    return found


def bands_of_hidden(order: Order, weights: Weights, *, every: bool) -> list[Band]:
    """Bands of which the hidden layer is known: of what tokens run, or of every learner for every token."""
    return [Band(slice(None), weights.learners)] if every else order.bands


def first_layer(xs_TD: Tensor, band: Band, w: Weights) -> list[Tensor]:
    """The first q learners' products with x, [rows, q * H] each, of the activated branch and of the other, if any."""
    made = []
    for w_NHD, b_NH in ((w.w_in, w.b_in), (w.w_up, w.b_up)):
        if w_NHD is not None:
            bias = None if b_NH is None else b_NH[: band.q].flatten()
            made.append(F.linear(xs_TD[band.rows], w_NHD[: band.q].flatten(0, 1), bias))
    return made


@contextmanager
def differentiated() -> Iterator[None]:
    """Autograd sees operations, also within an operator that a dispatch mode watches, which is run without its keys."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(keys.AutogradCPU).remove(keys.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def activated(made: Sequence[Tensor], w: Weights) -> list[Tensor]:
    """Products of `first_layer`, and the hidden values made of them; the graph between them is kept."""
    made = [of_branch.detach().requires_grad_() for of_branch in made]
    with differentiated():
        h = resolve(w.act)(made[0])
        return [*made, h if len(made) == 1 else h * made[1]]


def second_layer(hidden: Sequence[Sequence[Tensor]], weights: Weights, order: Order) -> Tensor:
    """y [T, O] in the order of tokens, of what `activated` gave."""
    parts = zip(order.bands, _per_band([made[-1].detach() for made in hidden], weights, order), strict=True)
    return order.unsort([torch.addmm(weights.b_out[q], h, out_layer(weights, q).T) for (_, q), h in parts])


def _per_band(values: Sequence[Tensor], weights: Weights, order: Order) -> list[Tensor]:
    """Parts [rows, q * H] that belong to a band, of values of each band or of all rows and learners; views."""
    width = weights.w_in.shape[1]
    if len(values) == len(order.bands) != 1:
        return list(values)
    (whole,) = values
    return [whole[rows, : q * width] for rows, q in order.bands]


def _of_tokens(branches: Sequence[Sequence[Tensor]], weights: Weights, order: Order) -> Tensor:
    """Gradients of tokens, [T, D]."""
    dx = []
    for place, (_, q) in enumerate(order.bands):
        of_band = branches[0][place] @ weights.w_in[:q].flatten(0, 1)
        if weights.w_up is not None:
            _add_product(of_band, branches[1][place], weights.w_up[:q].flatten(0, 1))
        dx.append(of_band)
    return order.unsort(dx)


def _of_weights(
    xs_TD: Tensor, dys_TO: Tensor, values: Sequence[Sequence[Tensor]], w: Weights, order: Order, wanted: set[str]
) -> dict[str, Tensor]:
    """Gradients of the wanted weights by name; values: bands of h, and of what reaches branches."""
    h, *branches = values
    found = {name: t.new_zeros(t.shape) for name, t in w.tensors._asdict().items() if name in wanted}
    for place, (rows, q) in enumerate(order.bands):
        if "b_out" in found:
            found["b_out"][q] = dys_TO[rows].sum(0)
        if "w_out" in found:
            _add_product(found["w_out"][:, :q].flatten(1), dys_TO[rows].T, h[place])
        for branch, da in zip(("in", "up"), branches, strict=False):
            if f"w_{branch}" in found:
                _add_product(found[f"w_{branch}"][:q].flatten(0, 1), da[place].T, xs_TD[rows])
            if f"b_{branch}" in found:
                found[f"b_{branch}"][:q].flatten().add_(da[place].sum(0))
    return found


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product in place, by an operation that torch's FLOP counter counts."""
    torch.addmm(total, left, right, out=total)


def _by_reference(
    ctx: Any, dy_TO: Tensor, x_TD: Tensor, k_T: Tensor, nu_TC: Tensor | None, weights: Weights
) -> tuple[Tensor | None, ...]:
    """The gradients with a graph of their own."""
    inputs = [x_TD, k_T, nu_TC, None, None, None, *weights.tensors]
    wanted = [place for place, wants in enumerate(ctx.needs_input_grad) if wants]
    plain = run_learners(x_TD, k_T, weights) if nu_TC is None else relaxed_output(x_TD, nu_TC, weights, ctx.k_min)
    leaves: Any = [inputs[place] for place in wanted]
    grads = torch.autograd.grad(plain, leaves, dy_TO, create_graph=True, allow_unused=True)
    by_place = dict(zip(wanted, grads, strict=True))
    return tuple(by_place.get(place) for place in range(len(inputs)))
