"""Output channels of a linear that a value shows, followed through chunks, slices and reshapes.

Packed gated MLPs compute both branches by one linear: `a, b = w(x).chunk(2, -1)`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from acm_compiler.passes.capture.op_names import COPIES, RESHAPES, argument
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.values import Value
from acm_compiler.passes.find.weight_views import SPLITS, TAKES, part_spans, taken

Axis = tuple[int, int]  # (entries, channels from one entry to the next)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The value's trailing axes run over channels `offset + i * stride + ...` of the linear `linear`."""

    linear: str
    offset: int
    tail: tuple[Axis, ...]

    @property
    def span(self) -> tuple[int, int] | None:
        """(start, stop) where the channels are one run along the last axis."""
        if len(self.tail) != 1 or self.tail[0][1] != 1:
            return None
        return self.offset, self.offset + self.tail[0][0]

    @property
    def size(self) -> int:
        """Number of channels shown."""
        return math.prod(entries for entries, _ in self.tail)

    def narrowed(self, axis: int, start: int | None, stop: int | None, step: int = 1) -> Channels:
        """Entries start:stop:step of trailing axis `axis`."""
        size, stride = self.tail[axis]
        picked = range(size)[start:stop:step]
        tail = list(self.tail)
        tail[axis] = (len(picked), stride * step)
        first = picked[0] if len(picked) else 0
        return dataclasses.replace(self, offset=self.offset + stride * first, tail=tuple(tail))

    def selected(self, axis: int, index: int) -> Channels:
        """Entry `index` of trailing axis `axis`, which goes."""
        size, stride = self.tail[axis]
        tail = (*self.tail[:axis], *self.tail[axis + 1 :])
        return dataclasses.replace(self, offset=self.offset + stride * (index % size), tail=tail)


def channels_of(flow: Dataflow, name: str) -> Channels | None:
    """The channels that `name` shows; None when it is more than a packing of one linear's output."""
    linear = flow.linears.get(name)
    if linear is not None:
        return Channels(linear=name, offset=0, tail=((linear.d_out, 1),))
    value = flow.values[name]
    if value.op == "result":
        return _part(flow, value)
    if not value.args or value.op not in COPIES | RESHAPES | TAKES:
        return None
    source = flow.values[value.args[0]]
    before = channels_of(flow, source.name)
    if before is None or source.shape is None or value.shape is None:
        return None
    if value.op in COPIES:
        return before
    if value.op in RESHAPES:
        return _reshaped(before, source.shape, value.shape)
    return _narrowed(value, before, len(source.shape))


def _part(flow: Dataflow, value: Value) -> Channels | None:
    """One of the results of chunk, split or unbind."""
    several, index = flow.values[value.args[0]], argument(value.node, 1, "index")
    if not several.args or not isinstance(index, int) or several.op not in SPLITS | {"unbind"}:
        return None
    source = flow.values[several.args[0]]
    before = channels_of(flow, source.name)
    if before is None or source.shape is None:
        return None
    dim = argument(several.node, 1 if several.op == "unbind" else 2, "dim", 0)
    axis = _trailing(dim, len(source.shape), before)
    if axis is None:
        return None
    if several.op == "unbind":
        return before.selected(axis, index)
    spans = part_spans(several.node, several.op, before.tail[axis][0])
    return before.narrowed(axis, *spans[index]) if spans else None


def _trailing(dim: Any, rank: int, channels: Channels) -> int | None:
    """The trailing axis that the tensor's axis `dim` is; None for a token axis."""
    axis = dim % rank - (rank - len(channels.tail))
    return axis if axis >= 0 else None


def _narrowed(value: Value, before: Channels, rank: int) -> Channels | None:
    """`x[..., a:b]`, `x.narrow(-1, a, n)`, `x[:, :, i]` and the like; full slices alone may fall on token axes."""
    items, leading = taken(value.node, value.op, rank), rank - len(before.tail)
    if items is None or any(item != slice(None) for item in items[:leading]):
        return None
    channels = before
    for axis in reversed(range(len(before.tail))):
        item = items[leading + axis]
        if isinstance(item, int):
            channels = channels.selected(axis, item)
        else:
            channels = channels.narrowed(axis, item.start, item.stop, item.step or 1)
    return channels


def _reshaped(before: Channels, old: tuple[int, ...], new: tuple[int, ...]) -> Channels | None:
    """`before` after a row-major reshape that keeps tokens and channels apart."""
    lead = math.prod(old[: len(old) - len(before.tail)])
    size = math.prod(entries for entries, _ in before.tail)
    for count in range(len(new) + 1):
        axes = new[len(new) - count :]
        if math.prod(axes) == size and math.prod(new[: len(new) - count]) == lead and count:
            return _split_tail(before, axes)
    return None


def _split_tail(before: Channels, axes: tuple[int, ...]) -> Channels | None:
    if tuple(entries for entries, _ in before.tail) == axes:
        return before
    for (_, outer), (entries, inner) in zip(before.tail, before.tail[1:], strict=False):
        if outer != entries * inner:  # not one run any more
            return None
    stride, tail = before.tail[-1][1], []
    for entries in reversed(axes):
        tail.append((entries, stride))
        stride *= entries
    return dataclasses.replace(before, tail=tuple(reversed(tail)))
