"""Parameters seen through views: which rows of which parameter a linear really multiplies by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from acm_compiler.passes.capture.op_names import COPIES, RESHAPES, argument, op_set
from acm_compiler.site import LinearRef

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightView:
    """Axis i of the view is the span `spans[i]` of axis `axes[i]` of the parameter, whose shape is `full`."""

    param: str
    full: tuple[int, ...]
    axes: tuple[int, ...]
    spans: tuple[Span, ...]

    @classmethod
    def whole(cls, param: str, shape: tuple[int, ...]) -> WeightView:
        return cls(param=param, full=shape, axes=tuple(range(len(shape))), spans=tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.spans)

    def permuted(self, order: tuple[int, ...]) -> WeightView:
        return dataclasses.replace(
            self, axes=tuple(self.axes[i] for i in order), spans=tuple(self.spans[i] for i in order)
        )

    def sliced(self, axis: int, start: int | None, stop: int | None) -> WeightView:
        """The view `[start:stop]` along `axis`, with Python's rules for negative and missing ends."""
        low, high = self.spans[axis]
        first, last, _ = slice(start, stop).indices(high - low)
        spans = list(self.spans)
        spans[axis] = (low + first, low + max(first, last))
        return dataclasses.replace(self, spans=tuple(spans))

    def rows(self, axis: int) -> Span | None:
        """The span along `axis` of the view; None when it is all of the parameter."""
        span = self.spans[axis]
        return None if span == (0, self.full[self.axes[axis]]) else span


Views = WeightView | tuple[WeightView, ...]


def view_of(node: fx.Node, op: str, source: Views) -> Views | None:
    """View shown by `node`, an `op` of the parameter view(s) `source`; None when it is no longer a plain view."""
    # `w_q, w_k, w_v = self.in_proj_weight.chunk(3)`, `x @ self.w[:d].t()`, `self.w.t().to(x.dtype)`
    if op == "result":
        return source[argument(node, 1, "index")] if isinstance(source, tuple) else None
    if isinstance(source, tuple):
        return None
    if op in COPIES:
        return source
    if op in RESHAPES:
        return source if node.meta.get("shape") == source.shape else None
    if op in _TRANSPOSES:
        return source.permuted(_TRANSPOSES[op](node, len(source.axes)))
    if op in SPLITS:
        return _parts(node, op, source)
    return _narrowed(node, op, source) if op in TAKES else None


def _transpose(node: fx.Node, rank: int) -> tuple[int, ...]:
    a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _permute(node: fx.Node, rank: int) -> tuple[int, ...]:
    first = argument(node, 1, "dims")
    dims: Any = node.args[1:] if isinstance(first, int) else first
    return tuple(d % rank for d in dims)


def _reverse(_node: fx.Node, rank: int) -> tuple[int, ...]:
    return tuple(reversed(range(rank)))


_TRANSPOSES: dict[str, Callable[[fx.Node, int], tuple[int, ...]]] = {
    "transpose": _transpose,
    "permute": _permute,
    "t": _reverse,
    "T": _reverse,
    "mT": lambda _, rank: (*range(rank - 2), rank - 1, rank - 2),
}


SPLITS = op_set("chunk split split_with_sizes tensor_split")
_HOW = ("chunks", "split_size", "split_sizes", "sections", "indices", "tensor_indices_or_sections")


def part_spans(node: fx.Node, op: str, size: int) -> list[Span] | None:
    """Spans of the parts of a chunk or split of an axis with `size` entries; None if not by number."""
    how: Any = argument(node, 1, "split_size_or_sections")
    for keyword in _HOW:
        how = node.kwargs.get(keyword, how)
    if op == "tensor_split" and _are_numbers(how):
        how = [len(part) for part in torch.empty(size, device="meta").tensor_split(how)]
        if sum(how) != size:  # places that do not rise: parts overlap
            return None
    if isinstance(how, (list, tuple)) and _are_numbers(how):
        stops = [sum(how[: i + 1]) for i in range(len(how))]
    elif isinstance(how, int):
        step = -(-size // how) if op == "chunk" else how
        stops = [min(i + step, size) for i in range(0, size, step)]
    else:
        return None
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _are_numbers(how: Any) -> bool:
    return all(isinstance(h, int) for h in (how if isinstance(how, (list, tuple)) else [how]))


def _parts(node: fx.Node, op: str, source: WeightView) -> Views | None:
    axis = argument(node, 2, "dim", 0) % len(source.axes)
    spans = part_spans(node, op, source.shape[axis])
    return None if spans is None else tuple(source.sliced(axis, *span) for span in spans)


TAKES = op_set("slice narrow select getitem")


def taken(node: fx.Node, op: str, rank: int) -> list[int | slice] | None:
    """Index that `node`, one of TAKES, applies to each axis of its operand; None for all but numbers and slices."""
    items: list[Any]
    if op == "getitem":
        index = argument(node, 1, "index")
        items = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis not in items:
            items.append(Ellipsis)
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank - len(items) + 1)
    else:
        start, stop = argument(node, 2, "index" if op == "select" else "start", 0), argument(node, 3, "end")
        if op == "narrow":
            length = argument(node, 3, "length")
            stop = start + length if isinstance(start, int) and isinstance(length, int) else length
            stop = None if stop == 0 and start < 0 else stop  # the last ones: `w.narrow(0, -d, d)`
        items = [slice(None)] * rank
        items[argument(node, 1, "dim", 0)] = start if op == "select" else slice(start, stop, argument(node, 4, "step"))
    ends = [end for item in items if isinstance(item, slice) for end in (item.start, item.stop, item.step)]
    plain = all(isinstance(item, (int, slice)) for item in items)
    return items if plain and all(isinstance(end, (int, type(None))) for end in ends) else None


def _narrowed(node: fx.Node, op: str, source: WeightView) -> WeightView | None:
    """The view without some entries of its axes; single ones of them, or every other one, are no matrix."""
    # `w[:d]` and `w[d:, :]` are; `w[0]`, `w[::2]` and `w[index]` are not
    items, view = taken(node, op, len(source.axes)), source
    if items is None:
        return None
    for axis, item in enumerate(items):
        if not isinstance(item, slice) or item.step not in (None, 1):
            return None
        view = view.sliced(axis, item.start, item.stop)
    return view


def linear_ref(weight: WeightView, out_axis: int, bias: WeightView | None) -> LinearRef | str:
    """The reference for a product with `weight`, whose axis `out_axis` of two is the output; else the reason."""
    if len(weight.full) != 2:
        return f"mixture of experts: {weight.param} holds several matrices; experts are not converted"
    if weight.rows(1 - out_axis) is not None:
        return f"only some input columns of {weight.param} are used"
    rows = weight.rows(out_axis)
    if bias is not None and (len(bias.full) != 1 or bias.rows(0) != rows):
        return f"rows of {weight.param} and of {bias.param} do not match"
    return LinearRef(
        weight=weight.param,
        bias=bias.param if bias else None,
        transposed=weight.axes[out_axis] == 1,
        rows=rows,
    )
