"""Graft R: objects in the place of bare parameters, which turn the functions that use them into the ACM.

before: h = F.gelu(F.linear(x, self.w1, self.b1)); y = h @ self.w2.t()
after:  the same lines; `self.w1` keeps x and gives a dummy, `self.w2` gives the ACM's output for the kept x

The user's forward runs as it was written, control flow included: nothing is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm import ACM
from acm_compiler.passes.capture.op_names import COPIES, RESHAPES, op_set
from acm_compiler.passes.rewrite.stand_ins import Replaced, Rows, StashedACM, Use, dummy
from acm_compiler.site import Site


class WeightStandIn:
    """Stand-in for a matrix or bias whose rows belong to sites; torch functions given it come here.

    It shows `rows` of the parameter, whose outputs lie on axis `out_axis` of `shape`.
    """

    def __init__(self, source: Replaced, *, shape: tuple[int, ...], rows: Rows, out_axis: int) -> None:
        self.source, self.shape, self.rows, self.out_axis = source, torch.Size(shape), rows, out_axis

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = list(_flat((*args, *kwargs.values())))
        shown = [operand for operand in operands if isinstance(operand, WeightStandIn)]
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        # a view: `self.w1[:d].t()`
        if not tensors:
            return shown[0]._viewed(func, args[1:], kwargs)
        leader = _leader(shown)
        # rows that stay dense: `x @ self.qkv[:d].t()` beside a site of the rows from d on
        if leader.use is None:
            return func(*_real(args), **_real(kwargs))
        return leader._called(func, tensors, leader.use)

    def _called(self, func: Callable[..., Any], tensors: Sequence[Tensor], use: Use) -> Tensor:
        """The result of a call with `tensors` that computes the first linears of a site, or its last one."""
        # a bias that the model computed: `F.linear(h, self.w2, self.scale * self.offset)`
        if func is F.linear and use.part == "last" and len(tensors) == 2:
            return use.acm(tensors[0]) + tensors[1]
        if len(tensors) != 1:
            raise self.source.misused(f"{func.__name__} of {len(tensors)} other tensors")
        if len(self.shape) == 1:
            # a bias added by itself, `h @ self.w2.t() + self.b2`: the ACM has added it, and to a dummy it means nothing
            return tensors[0]
        # `h @ self.w2.t()` gives the ACM's output, `F.linear(x, self.w1, self.b1)` keeps x
        if use.part == "last":
            return use.acm(tensors[0])
        if use.stash is None:
            raise self.source.misused(func.__name__)
        use.stash.put(tensors[0])
        return dummy(tensors[0], self.shape[self.out_axis])

    def _viewed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        view = _VIEWS.get(function.__name__)
        if view is None:
            raise self.source.misused(function.__name__)
        return view(self, *args, **kwargs)

    @property
    def use(self) -> Use | None:
        """The use of the rows that it shows; None where they stay dense."""
        return self.source.use_of(self.rows)

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.source.uses[0].acm.learners.b_out, name)
        if name in _VIEWS:
            return partial(_VIEWS[name], self)
        raise AttributeError(f"{name!r}: the parameter here was replaced by an ACM")

    def __add__(self, other: Any) -> Any:
        return torch.add(other, self)  # type: ignore[call-overload]

    def __getitem__(self, index: Any) -> WeightStandIn:
        view, axis = self, 0
        for item in index if isinstance(index, tuple) else (index,):
            if item is Ellipsis:
                axis = len(self.shape) - 1
                continue
            if not isinstance(item, slice) or item.step not in (None, 1):
                raise self.source.misused(f"index {item!r}")
            start, stop, _ = item.indices(view.shape[axis])
            view, axis = view.sliced(axis, start, stop), axis + 1
        return view

    def sliced(self, axis: int, start: int, stop: int) -> WeightStandIn:
        """The view [start:stop] along `axis`."""
        if (start, stop) == (0, self.shape[axis]):
            return self
        if axis != self.out_axis:
            raise self.source.misused("a part of its input columns")
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        rows = (self.rows[0] + start, self.rows[0] + stop)
        return WeightStandIn(self.source, shape=shape, rows=rows, out_axis=axis)

    def flipped(self) -> WeightStandIn:
        """The transposed view."""
        if len(self.shape) == 1:
            return self
        return WeightStandIn(self.source, shape=self.shape[::-1], rows=self.rows, out_axis=1 - self.out_axis)

    def real(self) -> Tensor:
        """The rows themselves, of a parameter that stays because some of its rows are dense."""
        tensor = self.source.tensor().narrow(self.source.out_axis, self.rows[0], self.rows[1] - self.rows[0])
        return tensor if self.out_axis == self.source.out_axis else tensor.t()

    @property
    def T(self) -> WeightStandIn:
        return self.flipped()

    mT = T

    @property
    def data(self) -> WeightStandIn:
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.source.uses[0].acm.learners.b_out.dtype

    @property
    def device(self) -> torch.device:
        return self.source.uses[0].acm.learners.w_in.device

    @property
    def requires_grad(self) -> bool:
        return False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


def _leader(shown: Sequence[WeightStandIn]) -> WeightStandIn:
    """The one that decides what a call is: the matrix speaks for a bias beside it."""
    return next((s for s in shown if len(s.shape) == 2), shown[0])


def dense_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with the parameters themselves in place of stand-ins; None where an ACM takes the call."""
    shown = [operand for operand in _flat((*args, *kwargs.values())) if isinstance(operand, WeightStandIn)]
    if shown and _leader(shown).use is not None:
        return None
    return _real(tuple(args)), _real(dict(kwargs))


def stand_in_for(tensor: Tensor, source: Replaced) -> WeightStandIn:
    """The stand-in that shows all of `source`, which `tensor` was."""
    rows = (0, tensor.shape[source.out_axis])
    return WeightStandIn(source, shape=tuple(tensor.shape), rows=rows, out_axis=source.out_axis)


def uses_of(site: Site, acm: ACM, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, Use]]:
    """Each parameter of the site, the axis of its outputs, and what it is used for."""
    stash = acm.stash if isinstance(acm, StashedACM) else None
    for ref in site.refs:
        part: Literal["first", "last"] = "last" if ref is (site.last or site.first[0]) else "first"
        for name, axis in ((ref.weight, 1 if ref.transposed else 0), (ref.bias, 0)):
            if name is not None:
                rows = ref.rows or (0, tensors[name].shape[axis])
                yield name, axis, Use(acm=acm, stash=stash, part=part, rows=rows)


def _transposed(view: WeightStandIn, dim0: int, dim1: int) -> WeightStandIn:
    return view if (dim0 - dim1) % len(view.shape) == 0 else view.flipped()


def _permuted(view: WeightStandIn, *dims: Any) -> WeightStandIn:
    order = dims[0] if isinstance(dims[0], (tuple, list)) else dims
    return view if order[0] % len(view.shape) == 0 else view.flipped()


def _narrowed(view: WeightStandIn, dim: int, start: int, length: int) -> WeightStandIn:
    start %= view.shape[dim]
    return view.sliced(dim % len(view.shape), start, start + length)


def _split(view: WeightStandIn, sections: Any = None, dim: int = 0, **named: Any) -> tuple[WeightStandIn, ...]:
    size, sections = view.shape[dim], next(iter(named.values())) if named else sections
    if isinstance(sections, int):
        sections = [min(sections, size - start) for start in range(0, size, sections)]
    starts = [sum(sections[:i]) for i in range(len(sections))]
    axis = dim % len(view.shape)
    return tuple(view.sliced(axis, start, start + length) for start, length in zip(starts, sections, strict=True))


def _chunked(view: WeightStandIn, chunks: int, dim: int = 0) -> tuple[WeightStandIn, ...]:
    return _split(view, -(-view.shape[dim] // chunks), dim)


def _tensor_split(view: WeightStandIn, how: Any = None, dim: int = 0, **named: Any) -> tuple[WeightStandIn, ...]:
    parts = torch.empty(view.shape[dim], device="meta").tensor_split(next(iter(named.values())) if named else how)
    return _split(view, [len(part) for part in parts], dim)


def _copied(view: WeightStandIn, *_args: Any, **_kwargs: Any) -> WeightStandIn:
    return view


def _reshaped(name: str, view: WeightStandIn, *args: Any, **kwargs: Any) -> WeightStandIn:
    """The same view after a reshape that changes nothing, as `w.view(w.shape[0], -1)`."""
    shapes = [torch.empty(v.shape, device="meta") if isinstance(v, WeightStandIn) else v for v in (view, *args)]
    if getattr(shapes[0], name)(*shapes[1:], **kwargs).shape != view.shape:
        raise view.source.misused(name)
    return view


# what the learners' tensors answer as the parameter did
_FACTS = op_set("is_cuda is_cpu is_meta is_sparse layout itemsize element_size is_floating_point is_leaf")
# what the analysis takes for a view, too
_VIEWS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*COPIES, "requires_grad_"), _copied),
    **{name: partial(_reshaped, name) for name in RESHAPES},
    "t": WeightStandIn.flipped,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transposed),
    "permute": _permuted,
    "narrow": _narrowed,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _chunked,
    "tensor_split": _tensor_split,
}


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _real(value: Any) -> Any:
    if isinstance(value, WeightStandIn):
        return value.real()
    if isinstance(value, (tuple, list)):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {name: _real(item) for name, item in value.items()}
    return value
