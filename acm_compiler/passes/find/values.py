"""Facts of the analysis: values and linears in a model's dataflow, regions that are sites, and look-alikes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from acm_compiler.passes.capture.graph import ModuleCall
from acm_compiler.passes.find.weight_views import WeightView
from acm_compiler.site import LinearRef, Role, SiteKind

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Computation of one captured node.

    `args`: the values that flow in. `live`: it depends on the model's inputs. `learned`: on a parameter.
    """

    name: str
    op: str
    args: tuple[str, ...]
    shape: Shape | None
    live: bool
    learned: bool
    stack: tuple[ModuleCall, ...]
    source: str | None
    node: fx.Node

    @property
    def place(self) -> str:
        """Its line of code in brackets, for messages; empty where that is not known."""
        return f" ({self.source})" if self.source else ""

    @property
    def dtype(self) -> torch.dtype | None:
        """Its type, where it is a tensor."""
        return self.node.meta.get("dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A product of the value `x` with a matrix that does not depend on the model's inputs.

    `nodes`: the captured nodes that compute it, the last one under `name`. `ref` is None, and `problem` says why,
    where the matrix is not simply rows of one parameter. `weight` names a parameter behind it either way.
    `own_bias`: its bias is put together from parameters in every forward, and is none of `ref`.
    """

    name: str
    x: str
    d_in: int
    d_out: int
    tokens: int
    nodes: tuple[str, ...]
    weight: str
    ref: LinearRef | None
    problem: str | None = None
    own_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """An operation that reads a parameter through `view`."""

    reader: str
    view: WeightView

    def overlaps(self, ref: LinearRef) -> bool:
        """True if the part read shares rows with `ref`, of whose weight or bias `view` is one."""
        axis = 1 if ref.transposed and len(self.view.full) == 2 else 0
        if ref.rows is None or axis not in self.view.axes:
            return True
        start, stop = self.view.spans[self.view.axes.index(axis)]
        return start < ref.rows[1] and ref.rows[0] < stop


def tokens_of(shape: Shape) -> int:
    """Number of vectors in a tensor [..., features]."""
    return math.prod(shape[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The values between a site's input and its output during one run.

    `x` is what its first linears read and `output` what its last linear gives; `nodes` are the captured nodes that
    compute the output from x, without x itself. `linears`: the value names of its linears, in the order of
    `first` + (`last`,). `own_bias`: a bias that the model computes is added to the output, and stays the model's.
    """

    kind: SiteKind
    role: Role | None = None
    x: str
    output: str
    linears: tuple[str, ...]
    first: tuple[LinearRef, ...]
    last: LinearRef | None
    act: str
    nodes: frozenset[str]
    d_in: int
    d_out: int
    dense_width: int | None
    tokens: int
    own_bias: bool = False

    @property
    def refs(self) -> tuple[LinearRef, ...]:
        """All of its matrices."""
        return self.first if self.last is None else (*self.first, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAlike:
    """Linears that look like a site and are none, the last of them naming the skip."""

    linears: tuple[str, ...]
    reason: str
