"""Finds projections whose heads can change their basis in pairs without changing any output.

q pairs with k, v with o, and a packed qkv with o.

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
from acm_compiler.passes.find.attention_roles import operand_roles
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.values import Value
from acm_compiler.site import Pair, Site

_NO_HEADS = "the attention does not read it head by head"
_RESULT_MIXED = "the attention's result is not read head by head"
_NOT_ALL = "the attention does not read all of its heads, or of its partner's"
_OUT_OF_ORDER = "its heads do not meet the partner's in order"
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
        channels = _channels(site.d_out).expand(flow.values[output].shape or ())
        if site.role in ("q", "k", "v"):
            ends[output] = _follow(flow, output, channels)
        elif site.role == "qkv":
            found |= _packed_pair(flow, site, _ends(flow, output, channels), outputs)
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
    """Follow `channels`, shaped like the value `name`, to the one that first computes with them."""
    # `q(x).view(B, T, H, d).transpose(1, 2) * d**-0.5`, up to the product or the attention that reads it
    ends = _ends(flow, name, channels)
    if isinstance(ends, str) or len(ends) == 1:
        return ends if isinstance(ends, str) else ends[0]
    return f"its output is read by {', '.join(end.value.op for end in ends)}, not by attention alone"


def _ends(flow: Dataflow, name: str, channels: Tensor) -> list[_End] | str:
    """Follow `channels`, shaped like the value `name`, to all that first compute with them."""
    # what nothing reads was computed for naught
    users = [flow.values[u] for u in flow.consumers(name) if _is_read(flow, u)]
    others = f"its output is read by {', '.join(user.op for user in users) or 'no one'}, not by attention alone"
    if not users or name in flow.outputs:
        return others
    ends: list[_End] = []
    for value in users:
        if value.op in ATTENTION | PRODUCTS | {"linear"}:
            ends.append(_End(value=value, operand=name, channels=channels))
            continue
        moved = _moved(flow, value, name, channels)
        if moved is None:
            return others if len(users) > 1 else f"{value.op}{value.place} lies between it and the attention"
        for part, shown in moved.items():
            reached = _ends(flow, part, shown)
            if isinstance(reached, str):
                return reached
            ends += reached
    return ends


def _is_read(flow: Dataflow, name: str) -> bool:
    return bool(flow.consumers(name)) or name in flow.outputs


def _moved(flow: Dataflow, value: Value, name: str, channels: Tensor) -> dict[str, Tensor] | None:
    """The channels of `value`, or its parts, made from `name` by a move or a product with a number; else None."""
    if value.op in COPIES - DROPOUTS:
        return {value.name: channels.contiguous()}
    others = [arg for arg in value.args if arg != name]
    if value.op == "neg" or (value.op in ("mul", "div") and value.args[:1] == (name,)):
        return {value.name: channels} if all(_is_number(flow.values[other]) for other in others) else None
    if value.op not in RESHAPES | MOVES or others:
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
        made = value.node.target(*args, **kwargs)
    except RuntimeError:  # a view that holds only for the strides of the model's own tensor
        return None
    if isinstance(made, Tensor):
        moved = {value.name: made}
    else:  # `q, k, v = qkv.chunk(3, -1)`
        parts = [flow.values[user] for user in flow.consumers(value.name) if _is_read(flow, user)]
        if any(part.op != "result" for part in parts):
            return None
        moved = {part.name: made[argument(part.node, 1, "index")] for part in parts}
    return moved if all(shown.shape == flow.values[part].shape for part, shown in moved.items()) else None


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
        return {site.name: _NO_HEADS, other.name: _NO_HEADS}
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
        return {one.name: _NOT_ALL, other.name: _NOT_ALL}
    group, rest = divmod(counts[0], counts[1])
    if rest or ones.shape != others.shape or not torch.equal(ones // max(group, 1), others):
        return {one.name: _OUT_OF_ORDER, other.name: _OUT_OF_ORDER}
    return {
        one.name: Pair(partner=other.name, heads=counts[0]),
        other.name: Pair(partner=one.name, heads=counts[1]),
    }


def _values_pair(flow: Dataflow, site: Site, v: _End, outputs: Mapping[str, Site]) -> dict[str, Pair | str]:
    """The output projection that reads what attention makes of the values of `site`."""
    read = _values_read(flow, site, v, outputs)
    if isinstance(read, dict):
        return read
    other, heads_G = read
    return _paired(other, _channels(len(heads_G)), site, heads_G, size=v.channels.shape[-1])


def _values_read(
    flow: Dataflow, site: Site, v: _End, outputs: Mapping[str, Site]
) -> tuple[Site, Tensor] | dict[str, Pair | str]:
    """The output projection of the attention that reads values of `site`, and the head of values in each of its heads.

    The reasons, by site, where there is no such projection or it mixes heads.
    """
    # `o((weights @ v).transpose(1, 2).flatten(2))`
    value, heads = v.value, _heads(v.channels)
    is_right = value.op in ATTENTION or (value.op in _MATRIX_PRODUCTS and value.args[-1] == v.operand)
    if heads is None or not is_right or value.shape is None:
        return {site.name: _NO_HEADS}
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
        return {site.name: _RESULT_MIXED, other.name: _RESULT_MIXED}
    return other, blocks.flatten()


def _in_order(ones: Tensor, others: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Heads of one side, those that meet the same head of the other next to each other, and the heads that they meet.

    None where not as many meet each.
    """
    if ones.shape != others.shape:
        return None
    met = sorted(set(zip(others.flatten().tolist(), ones.flatten().tolist(), strict=True)))
    theirs = tuple(dict.fromkeys(other for other, _ in met))
    if [other for other, _ in met] != [other for other in theirs for _ in range(len(met) // len(theirs))]:
        return None
    return tuple(one for _, one in met), theirs


def _packed_pair(
    flow: Dataflow, site: Site, ends: list[_End] | str, outputs: Mapping[str, Site]
) -> dict[str, Pair | str]:
    """The output projection of an attention all of whose queries, keys and values `site` gives."""
    # `q, k, v = qkv(x).view(B, T, 3, H, d).permute(2, 0, 3, 1, 4)`: heads are numbered over all rows of qkv
    if isinstance(ends, str):
        return {site.name: ends}
    known = {role: [e for e in ends if operand_roles(flow, e.value, e.operand) == {role}] for role in "qkv"}
    if len(ends) != 3 or any(len(own) != 1 for own in known.values()):
        return {site.name: "its queries, keys and values are not read once each by one attention"}
    q, k, v = (known[role][0] for role in "qkv")
    if q.value.name != k.value.name or (v.value.op in ATTENTION and v.value.name != q.value.name):
        return {site.name: "its queries meet the keys of another projection"}
    size, queries, keys = v.channels.shape[-1], _heads(_matrix(q)), _heads(_matrix(k))
    if queries is None or keys is None or _matrix(q).shape[-1] != size:
        return {site.name: _NO_HEADS}
    read = _values_read(flow, site, v, outputs)
    if isinstance(read, dict):
        return read
    other, of_values = read
    scores = _in_order(queries, _spread(q.value, keys, queries))
    sums = _in_order(_channels(len(of_values)), of_values)
    if scores is None or sums is None or sums[0] != tuple(range(len(of_values))):
        return {site.name: _OUT_OF_ORDER}
    roles = (*scores, sums[1])
    if sorted(head for own in roles for head in own) != list(range(site.d_out // size)):
        return {site.name: _NOT_ALL}
    return {
        site.name: Pair(partner=other.name, heads=site.d_out // size, roles=roles),
        other.name: Pair(partner=site.name, heads=len(of_values)),
    }


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
