"""Finds projections whose heads can change their basis in pairs, q with k and v with o, without changing any output.

q^T k = (T^-T q)^T (T k), and o(v) = (W_o T^-1)(T v): with a basis T of each head, learners can be slices of the
projections themselves. It holds where nothing lies between a projection and the attention but moves and numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from acm_compiler.passes.capture.op_names import ATTENTION, COPIES, DROPOUTS, MOVES, PRODUCTS, RESHAPES, argument
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.values import Value
from acm_compiler.site import Pair, Site

_MATRIX_PRODUCTS = PRODUCTS & {"matmul", "bmm", "baddbmm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Arrival of a projection's channels: operand `operand` of `value`, and the channel in each of its entries."""

    value: Value
    operand: str
    channels: Tensor


def find_pairs(flow: Dataflow, outputs: Mapping[str, Site]) -> dict[str, Pair | str]:
    """Find the pair of each projection in `outputs` (value name of its only run -> site), by site name, or why none."""
    found: dict[str, Pair | str] = {}
    ends: dict[str, _End | str] = {}
    for output, site in outputs.items():
        if site.role in ("q", "k", "v"):
            ends[output] = _follow(flow, output, _channels(site.d_out).expand(flow.values[output].shape or ()))
    for output, site in outputs.items():
        end = ends.get(output)
        if isinstance(end, str):
            found[site.name] = end
        elif end is not None and site.role == "v":
            found |= _values_pair(flow, site, end, outputs)
        elif end is not None and site.role == "q":
            found |= _scores_pair(site, end, {outputs[k]: e for k, e in ends.items() if outputs[k].role == "k"})
    return found


def _follow(flow: Dataflow, name: str, channels: Tensor) -> _End | str:
    """Follow `channels`, shaped like the value `name`, to what first computes with them."""
    # `q(x).view(B, T, H, d).transpose(1, 2) * d**-0.5`, up to the product or the attention that reads it
    while True:
        # what nothing reads was computed for naught
        users = [flow.values[u] for u in flow.consumers(name) if flow.consumers(u) or u in flow.outputs]
        if len(users) != 1 or name in flow.outputs:
            return f"its output is read by {', '.join(user.op for user in users) or 'no one'}, not by attention alone"
        value = users[0]
        if value.op in ATTENTION | PRODUCTS | {"linear"}:
            return _End(value=value, operand=name, channels=channels)
        moved = _moved(flow, value, name, channels)
        if moved is None:
            return f"{value.op}{value.place} lies between it and the attention"
        name, channels = value.name, moved


def _moved(flow: Dataflow, value: Value, name: str, channels: Tensor) -> Tensor | None:
    """The channels of `value`, made from `name` by a move or a multiplication with a number; else None."""
    if value.op in COPIES - DROPOUTS:
        return channels.contiguous()
    others = [arg for arg in value.args if arg != name]
    if value.op == "neg" or (value.op in ("mul", "div") and value.args[:1] == (name,)):
        return channels if all(_is_number(flow.values[other]) for other in others) else None
    if value.op not in RESHAPES | MOVES or others or value.shape is None:
        return None

    def concrete(node: fx.Node) -> Any:
        return channels if node.name == name else node

    # the model's own move, done to the numbers of channels: they end where the channels end
    args, kwargs = fx.map_arg((value.node.args, value.node.kwargs), concrete)
    rest: list[Any] = []
    fx.map_arg((args, kwargs), rest.append)
    if rest or not callable(value.node.target):
        return None
    try:
        moved = value.node.target(*args, **kwargs)
    except RuntimeError:  # a view that holds only for the strides of the model's own tensor
        return None
    return moved if isinstance(moved, Tensor) and moved.shape == value.shape else None


def _is_number(value: Value) -> bool:
    return not value.live and not value.learned and value.shape in ((), (1,))


def _scores_pair(site: Site, q: _End, keys: Mapping[Site, _End | str]) -> dict[str, Pair | str]:
    """The key projection that meets the queries of `site` in one product."""
    partner = next(((k, e) for k, e in keys.items() if not isinstance(e, str) and e.value.name == q.value.name), None)
    if partner is None:
        return {site.name: "no projection of its own gives the keys that it meets"}
    other, k = partner
    queries, values = _heads(_matrix(q)), _heads(_matrix(k))
    if queries is None or values is None:
        why = "the attention does not read it head by head"
        return {site.name: why, other.name: why}
    return _paired(site, queries, other, _spread(q.value, values, queries), size=_matrix(q).shape[-1])


def _matrix(end: _End) -> Tensor:
    """The channels with the axis that scores are summed over last: [..., tokens, channels of a head]."""
    # `q @ k.mT` sums over the last axis of its left operand and over the last but one of its right
    if end.value.op in ATTENTION or end.operand == end.value.args[-2]:
        return end.channels
    return end.channels.transpose(-2, -1)


def _channels(count: int) -> Tensor:
    # whatever the caller's default device is
    return torch.arange(count, device="cpu")


def _heads(channels: Tensor) -> Tensor | None:
    """Head in each batch entry of [..., tokens, channels of a head], [...]; None where heads are mixed."""
    size = channels.shape[-1]
    heads = channels[..., 0, 0] // size
    whole = heads[..., None, None] * size + _channels(size)
    return heads if torch.equal(whole.expand(channels.shape), channels) else None


def _spread(attention: Value, few: Tensor, many: Tensor) -> Tensor:
    """Heads of keys or values, one for each head of the queries."""
    if attention.op in ATTENTION and argument(attention.node, 7, "enable_gqa", False):
        few = few.repeat_interleave(many.shape[-1] // few.shape[-1], -1)
    return few


def _paired(one: Site, ones: Tensor, other: Site, others: Tensor, *, size: int) -> dict[str, Pair | str]:
    """A pair where head g of `one` always meets head g // group of `other`, and none of either is left over."""
    counts = int(ones.max()) + 1, int(others.max()) + 1
    # `k[:, :2]` of four heads: a basis for what is not read is as good as none
    if (counts[0] * size, counts[1] * size) != (one.d_in if one.role == "o" else one.d_out, other.d_out):
        why = "the attention does not read all of its heads, or of its partner's"
        return {one.name: why, other.name: why}
    group, rest = divmod(counts[0], counts[1])
    if rest or ones.shape != others.shape or not torch.equal(ones // max(group, 1), others):
        why = "its heads do not meet the partner's in order"
        return {one.name: why, other.name: why}
    return {
        one.name: Pair(partner=other.name, heads=counts[0]),
        other.name: Pair(partner=one.name, heads=counts[1]),
    }


def _values_pair(flow: Dataflow, site: Site, v: _End, outputs: Mapping[str, Site]) -> dict[str, Pair | str]:
    """The output projection that reads what attention makes of the values of `site`."""
    # `o((weights @ v).transpose(1, 2).flatten(2))`
    value, heads = v.value, _heads(v.channels)
    is_right = value.op in ATTENTION or (value.op in _MATRIX_PRODUCTS and value.args[-1] == v.operand)
    if heads is None or not is_right or value.shape is None:
        return {site.name: "the attention does not read it head by head"}
    if value.op in ATTENTION:
        heads = _spread(value, heads, torch.empty(value.shape[:-2], device="cpu"))
    size = v.channels.shape[-1]
    mixed = (heads[..., None, None] * size + _channels(size)).expand(value.shape)
    end = _follow(flow, value.name, mixed)
    if isinstance(end, str):
        return {site.name: end}
    other = outputs.get(end.value.name)
    if other is None or other.role != "o":
        return {site.name: "no output projection of its own reads the attention's result"}
    read = end.channels.flatten(0, -2)
    blocks = _heads(read[:1].unflatten(-1, (-1, 1, size)))
    if blocks is None or not torch.equal(read, read[:1].expand(read.shape)):
        why = "the attention's result is not read head by head"
        return {site.name: why, other.name: why}
    order = _channels(blocks.numel())
    return _paired(other, order, site, blocks.flatten(), size=size)


def with_pairs(sites: Mapping[str, Site], flow: Dataflow) -> dict[str, Site]:
    """`sites` (value name of the only run -> projection) by their names, with their pairs or why they have none."""
    found = find_pairs(flow, sites)
    result = {}
    for site in sites.values():
        pair = found.get(site.name)
        if isinstance(pair, Pair) and isinstance(found.get(pair.partner), Pair):
            result[site.name] = dataclasses.replace(site, pair=pair)
        else:
            why = pair if isinstance(pair, str) else "its partner cannot change its basis with it"
            result[site.name] = dataclasses.replace(site, unpaired=why)
    return result
