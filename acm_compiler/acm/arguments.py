"""Tensors of the operators by name: schemas, operand checks, rules, graph passes and kernels read their order here.

Operators take them flat: `GatedArguments(*tensors)` names those of a call, `GATED(*call)` makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from acm_compiler.errors import UsageError


class GateWeights(NamedTuple):
    """A gate's two linears: w_inner [G, D], b_inner [G], w_outer [C, G], b_outer [C]."""

    w_inner: Tensor
    b_inner: Tensor
    w_outer: Tensor
    b_outer: Tensor


class LearnerWeights(NamedTuple):
    """The tensors of `Weights`, in its order; shapes there."""

    w_in: Tensor
    b_in: Tensor | None
    w_up: Tensor | None
    b_up: Tensor | None
    w_out: Tensor | None
    b_out: Tensor
    w_top: Tensor | None
    s_in: Tensor | None = None
    s_up: Tensor | None = None
    s_out: Tensor | None = None
    s_top: Tensor | None = None


class GateArguments(NamedTuple):
    """`acm::gate`: x [T, D]; scalars: the knob (float32, or its bits), and the bounds of k."""

    x: Tensor
    w_inner: Tensor
    b_inner: Tensor
    w_outer: Tensor
    b_outer: Tensor
    knob: Tensor
    k_lo: Tensor
    k_hi: Tensor


class LearnersArguments(NamedTuple):
    """`acm::learners`: x [T, D], k [T], residual [T, O]."""

    x: Tensor
    k: Tensor
    w_in: Tensor
    b_in: Tensor | None
    w_up: Tensor | None
    b_up: Tensor | None
    w_out: Tensor | None
    b_out: Tensor
    w_top: Tensor | None
    s_in: Tensor | None
    s_up: Tensor | None
    s_out: Tensor | None
    s_top: Tensor | None
    residual: Tensor | None = None


class GatedArguments(NamedTuple):
    """`acm::gated_learners`: gate and learners of the same x; weight and bias [D] of the norm in front."""

    x: Tensor
    w_inner: Tensor
    b_inner: Tensor
    w_outer: Tensor
    b_outer: Tensor
    knob: Tensor
    k_lo: Tensor
    k_hi: Tensor
    w_in: Tensor
    b_in: Tensor | None
    w_up: Tensor | None
    b_up: Tensor | None
    w_out: Tensor | None
    b_out: Tensor
    w_top: Tensor | None
    s_in: Tensor | None
    s_up: Tensor | None
    s_out: Tensor | None
    s_top: Tensor | None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


def held(names: Sequence[str], *modules: nn.Module, kind: str = "_parameters") -> list[Any]:
    """Tensors of these names that modules hold, in eager code past torch's search, which outlasts a small kernel.

    kind: torch's own dict of such tensors.
    """
    if torch.compiler.is_compiling():  # Dynamo guards what it reads of a dict
        return [getattr(module, name) for module in modules for name in names]
    pairs = [(module, module.__dict__[kind]) for module in modules]
    # another tool may compute one (parametrizations, pruning), and absent ones are plain attributes
    return [found[name] if name in found else getattr(module, name) for module, found in pairs for name in names]


Part = TypeVar("Part", GateWeights, LearnerWeights, GateArguments)


def part(kind: type[Part], call: Any) -> Part:
    """Those of a call's tensors that `kind` names."""
    return kind(*(getattr(call, name) for name in kind._fields))


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one ACM's learners.

    s_n(z) = W_out,n act(W_in,n z + b_in,n), or W_out,n (act(W_in,n z + b_in,n) * (W_up,n z + b_up,n)) when gated.
    w_in, w_up [N, H, D]; b_in, b_up [N, H]; b_out [N + 1, O], row k for tokens that run k learners.
    w_out [O, N, H], or one per k: [N, O, N, H], of which entry k - 1 uses its first k learners.
    w_top: what k = N runs instead: a second layer [O, N * H] (form "mlp", "gated") or the dense weight [O, D] (form
    "linear").
    s_in, s_up [N, H], s_out [O] or [N, O], s_top [O]: scales of weights that are int8 (`int8`), one per output channel;
    of slices s_in is [N, G, H / G] ("rows") or [O] ("cols"); for 4 bits see `int4`. Absent where weights are floats.
    """

    w_in: Tensor
    b_in: Tensor | None
    w_up: Tensor | None
    b_up: Tensor | None
    w_out: Tensor | None
    b_out: Tensor
    w_top: Tensor | None
    s_in: Tensor | None = None
    s_up: Tensor | None = None
    s_out: Tensor | None = None
    s_top: Tensor | None = None
    act: str = field(kw_only=True)
    form: str = field(kw_only=True)

    @property
    def tensors(self) -> LearnerWeights:
        """Without activation and form, as the operators take them."""
        first = self.w_in, self.b_in, self.w_up, self.b_up, self.w_out, self.b_out, self.w_top
        return LearnerWeights(*first, self.s_in, self.s_up, self.s_out, self.s_top)

    @classmethod
    def of(cls, call: LearnersArguments | GatedArguments, *, form: str, act: str) -> Weights:
        """Those among the tensors of a call."""
        return cls(*part(LearnerWeights, call), form=form, act=act)

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """The same with every tensor that is there changed."""
        tensors: Any = (None if tensor is None else change(tensor) for tensor in self.tensors)
        return Weights(*tensors, form=self.form, act=self.act)

    @property
    def is_quantized(self) -> bool:
        """True if the weights are integers, with scales."""
        return self.s_in is not None

    @property
    def is_int4(self) -> bool:
        """True if they are of 4 bits, two in a byte."""
        return self.w_in.dtype == torch.uint8

    @property
    def learners(self) -> int:
        """N."""
        return self.w_in.shape[0]

    @property
    def is_nested(self) -> bool:
        """True if all k share one second layer, so that y_k is a running sum of learners."""
        return self.w_out is not None and self.w_out.dim() == 3 and self.w_top is None


def schema(kind: Any) -> str:
    """The positional arguments as an operator's schema declares them."""
    optional = {name: "?" if type(None) in get_args(hint) else "" for name, hint in get_type_hints(kind).items()}
    return ", ".join(f"Tensor{optional[n]} {n}{'=None' * (n in kind._field_defaults)}" for n in kind._fields)


def require_range(low: int, high: int, learners: int) -> None:
    """UsageError where the k of some tokens, from low to high, are outside [0, N]."""
    if low < 0 or high > learners:
        raise UsageError(
            "a token asks for more learners than there are, or fewer than none",
            found=f"k from {low} to {high}",
            expected=f"k in [0, {learners}]",
        )
