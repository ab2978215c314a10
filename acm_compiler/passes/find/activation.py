"""The activation between two linears as text: a name, or an expression that `acm.activations` can evaluate."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import is_fake

from acm_compiler.acm import activations
from acm_compiler.passes.capture.op_names import COPIES, RESHAPES, argument, op_set
from acm_compiler.passes.find.channels import Channels, channels_of
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.values import Value

# what each function takes beside its operand: (keyword, value that torch assumes)
_NUMBERS: dict[str, tuple[tuple[str, float], ...]] = {
    "leaky_relu": (("negative_slope", 0.01),),
    "celu": (("alpha", 1.0),),
    "softplus": (("beta", 1.0), ("threshold", 20.0)),
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
}
_REFLECTED = {"rsub": "sub", "rdiv": "div", "rpow": "pow"}
_BINARY = op_set("add sub mul div pow") | _REFLECTED.keys()


class Inexpressible(Exception):
    """Operations between two linears that are no pointwise function; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Some output channels of a first linear."""

    channels: Channels


@dataclass(frozen=True, slots=True)
class Call:
    """A pointwise function of other terms."""

    function: str
    operands: tuple[Term, ...]


Term = Leaf | Call | float


def leaves(term: Term) -> list[Leaf]:
    """The distinct leaves of `term`, in the order of their first appearance."""
    if isinstance(term, Leaf):
        return [term]
    if isinstance(term, float):
        return []
    return list(dict.fromkeys(leaf for operand in term.operands for leaf in leaves(operand)))


def text(term: Term) -> str:
    """`term` in the language of `acm.activations`, its single leaf written `x`; a name where it equals one."""
    written = _write(term)
    return name_of(written) or written


def _write(term: Term) -> str:
    if isinstance(term, Leaf):
        return "x"
    if isinstance(term, float):
        return repr(term)
    return f"{term.function}({', '.join(_write(o) for o in term.operands)})"


@functools.cache
def name_of(expression: str) -> str | None:
    """The named activation that `expression` computes, told by its values in float64."""
    if expression == "x":
        return "identity"
    x, got = _values(expression)
    for name, function in activations.NAMES.items():
        if torch.allclose(got, function(x), rtol=1e-7, atol=1e-9):
            return name
    return None


@functools.cache
def is_affine(expression: str) -> bool:
    """True if `expression` is a x + b, so that nothing non-linear happens between the linears."""
    x, y = _values(expression)
    at_zero, at_one = activations.resolve(expression)(torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu"))
    return bool(torch.allclose(y, at_zero + (at_one - at_zero) * x, rtol=1e-9, atol=1e-9))


def _values(expression: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, dense around zero and far out (an activation may be clipped there), and the values at them."""
    far = torch.logspace(1, 4, 40, dtype=torch.float64, device="cpu")
    x = torch.cat([-far, torch.linspace(-9.0, 9.0, 721, dtype=torch.float64, device="cpu"), far])
    return x, activations.resolve(expression)(x)


class TermReader:
    """Reads the operations above a value as a term; `model` tells the values of scalar buffers."""

    def __init__(self, flow: Dataflow, model: nn.Module) -> None:
        self.flow, self.model = flow, model
        self._seen: dict[str, Term] = {}

    def term(self, name: str) -> Term:
        """The computation of `name` from the linears above it. Raises Inexpressible with the reason."""
        if name not in self._seen:
            self._seen[name] = self._read(name)
        return self._seen[name]

    def _read(self, name: str) -> Term:
        value = self.flow.values[name]
        channels = channels_of(self.flow, name)
        if channels is not None:
            return Leaf(channels)
        if not value.live:
            return self._constant(value)
        if value.op in COPIES:
            return self.term(value.args[0])
        if value.op in RESHAPES and _keeps_rows(self.flow, value):
            return self.term(value.args[0])
        if value.op in _BINARY:
            return self._binary(value)
        return self._unary(value)

    def _operand(self, argument: Any) -> Term:
        if isinstance(argument, fx.Node):
            return self.term(argument.name)
        if isinstance(argument, (int, float)) and math.isfinite(argument):
            return float(argument)
        raise Inexpressible(f"an operand of the activation is {argument!r}")

    def _constant(self, value: Value) -> float:
        """The number that a value without inputs holds."""
        tensor, name = value.node.meta.get("value"), value.node.meta.get("param")
        if value.learned:
            used = name or value.name
            raise Inexpressible(f"{_where(value)} uses the learned parameter {used}, not a fixed function")
        if tensor is None and name is not None:
            tensor = self.model.get_buffer(name)
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and not (tensor.is_meta or is_fake(tensor)):
            return float(tensor)
        number = argument(value.node, 0, "data") if value.op in ("tensor", "scalar_tensor") else None
        if isinstance(number, (int, float)):
            return float(number)
        raise Inexpressible(f"{_where(value)} is not a plain number")

    def _binary(self, value: Value) -> Term:
        function = _REFLECTED.get(value.op, value.op)
        keyword = "exponent" if function == "pow" else "other"
        operands = [argument(value.node, 0, "input"), argument(value.node, 1, keyword)]
        if value.op in _REFLECTED:
            operands.reverse()
        if value.node.kwargs.get("rounding_mode") is not None:
            raise Inexpressible(f"{_where(value)} rounds")
        left, right = (self._operand(o) for o in operands)
        alpha: Any = value.node.kwargs.get("alpha", 1)
        if alpha != 1:
            right = Call("mul", (right, float(alpha)))
        return Call(function, (left, right))

    def _unary(self, value: Value) -> Term:
        node = value.node
        if value.op == "glu":
            return self._glu(value)
        if value.op == "gelu":
            tanh = argument(node, 1, "approximate", "none") == "tanh"
            return Call("gelu_tanh" if tanh else "gelu", (self._first(value),))
        if value.op in ("clamp", "clamp_min", "clamp_max"):
            return self._clamp(value)
        if value.op == "elu":
            return self._elu(value)
        if value.op == "reciprocal":
            return Call("div", (1.0, self._first(value)))
        if value.op in _NUMBERS:
            numbers = [float(argument(node, i + 1, k, d)) for i, (k, d) in enumerate(_NUMBERS[value.op])]
            default = numbers == [d for _, d in _NUMBERS[value.op]]
            return Call(value.op, (self._first(value), *(() if default else numbers)))
        if value.op in activations.POINTWISE and not _has_numbers(node):
            return Call(value.op, (self._first(value),))
        raise Inexpressible(f"{_where(value)} is not a pointwise function that an ACM can hold")

    def _first(self, value: Value) -> Term:
        return self._operand(argument(value.node, 0, "input"))

    def _glu(self, value: Value) -> Term:
        """`a * sigmoid(b)` for the halves a, b of the last axis."""
        source = self.flow.values[value.args[0]]
        channels = channels_of(self.flow, source.name)
        dim = argument(value.node, 1, "dim", -1)
        if channels is None or source.shape is None or dim % len(source.shape) != len(source.shape) - 1:
            raise Inexpressible(f"{_where(value)} does not split the output of one linear")
        size = channels.tail[-1][0]
        halves = [channels.narrowed(len(channels.tail) - 1, *s) for s in ((0, size // 2), (size // 2, size))]
        return Call("mul", (Leaf(halves[0]), Call("sigmoid", (Leaf(halves[1]),))))

    def _clamp(self, value: Value) -> Term:
        low, high = argument(value.node, 1, "min"), argument(value.node, 2, "max")
        if value.op == "clamp_max":
            low, high = None, argument(value.node, 1, "max")
        term = self._first(value)
        if low is not None and high is not None:
            return Call("clamp", (term, self._bound(low), self._bound(high)))
        if low is not None:
            return Call("clamp", (term, self._bound(low)))
        return Call("neg", (Call("clamp", (Call("neg", (term,)), -self._bound(high))),))

    def _elu(self, value: Value) -> Term:
        """elu, by any other name than `F.elu`, which has `inplace` in that place, also carries selu's scale."""
        node, scales = value.node, (1.0, 1.0)
        if node.target is not F.elu:
            scales = float(argument(node, 2, "scale", 1.0)), float(argument(node, 3, "input_scale", 1.0))
        if scales[1] != 1.0:
            raise Inexpressible(f"{_where(value)} scales its input")
        alpha = float(argument(node, 1, "alpha", 1.0))
        term = Call("elu", (self._first(value), *((alpha,) if alpha != 1.0 else ())))
        return Call("mul", (term, scales[0])) if scales[0] != 1.0 else term

    def _bound(self, argument: Any) -> float:
        bound = self._operand(argument)
        if not isinstance(bound, float):
            raise Inexpressible("a clamp's bound depends on the input")
        return bound


def _keeps_rows(flow: Dataflow, value: Value) -> bool:
    source = flow.values[value.args[0]]
    return bool(source.shape and value.shape) and source.shape[-1] == value.shape[-1]  # type: ignore[index]


def _has_numbers(node: fx.Node) -> bool:
    """True where a call gives a function more than its operand; flags such as `inplace` change no value."""
    return any(
        isinstance(given, (int, float)) and not isinstance(given, bool)
        for given in (*node.args[1:], *node.kwargs.values())
    )


def _where(value: Value) -> str:
    return f"{value.op} at {value.source}" if value.source else value.op
