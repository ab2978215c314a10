"""Activations as text: a name, or an expression over pointwise functions of `x`.

A site's activation travels in plans and saved directories, so it is a string, never code:
`gelu`, or `mul(x, sigmoid(mul(x, 1.702)))`. Only the functions listed here can be named.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.errors import UsageError, counted, did_you_mean
from acm_compiler.site import ACTIVATIONS

Activation = Callable[[Tensor], Tensor]

_BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
}
POINTWISE: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(F, name) for name, meaning in ACTIVATIONS.items() if meaning is None and name != "gelu_tanh"},
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "neg": torch.neg,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "abs": torch.abs,
    "square": torch.square,
    "logsigmoid": F.logsigmoid,
    "selu": F.selu,
    "celu": F.celu,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "erf": torch.erf,
    "clamp": torch.clamp,
    "softsign": F.softsign,
}
"""Functions of one operand, and perhaps of numbers behind it, that an expression may call."""


def resolve(act: str) -> Activation:
    """The function that `act` stands for; `UsageError` when it is neither a name nor a legal expression."""
    if act not in _COMPILED:
        _COMPILED[act] = _parse(act)
    return _COMPILED[act]


def _parse(act: str) -> Activation:
    try:
        tree = ast.parse(act, mode="eval").body
    except SyntaxError:
        tree = None
    if not isinstance(tree, ast.Call):
        raise UsageError(
            f"unknown activation {act!r}{did_you_mean(act, NAMES)}",
            expected=f"one of {', '.join(NAMES)}, or an expression such as mul(x, sigmoid(x))",
        )
    return _compile(tree, act)


def _compile(node: ast.expr, act: str) -> Callable[[Tensor], Tensor]:
    if isinstance(node, ast.Name) and node.id == "x":
        return lambda x: x
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _compile_call(node.func.id, node.args, act)
    raise _illegal(node, act)


def _compile_call(name: str, args: list[ast.expr], act: str) -> Callable[[Tensor], Tensor]:
    parts: list[Any] = [ast.literal_eval(a) if _is_number(a) else _compile(a, act) for a in args]
    if not any(callable(part) for part in parts):
        raise UsageError(f"activation {act!r}: {name} is applied to numbers only", expected="a use of x")
    if name in _BINARY and len(parts) == 2:
        return _binary(_BINARY[name], parts[0], parts[1])
    if name in POINTWISE and callable(parts[0]) and not any(callable(p) for p in parts[1:]):
        inner, numbers, function = parts[0], parts[1:], POINTWISE[name]
        return lambda x: function(inner(x), *numbers)
    functions = sorted(POINTWISE.keys() | _BINARY.keys())
    raise UsageError(
        f"activation {act!r}: {name} with {counted(len(parts), 'argument')}{did_you_mean(name, functions)}",
        expected=f"one of {', '.join(functions)}",
    )


def _binary(function: Callable[..., Tensor], left: object, right: object) -> Callable[[Tensor], Tensor]:
    """`function` of two operands, each a number or a function of x."""

    def apply(x: Tensor) -> Tensor:
        a = left(x) if callable(left) else torch.as_tensor(left, dtype=x.dtype, device=x.device)
        b = right(x) if callable(right) else right
        return function(a, b)

    return apply


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)


def _illegal(node: ast.expr, act: str) -> UsageError:
    return UsageError(
        f"activation {act!r}: {ast.unparse(node)!r} is not allowed",
        expected="calls of pointwise functions on x and numbers",
    )


NAMES: dict[str, Activation] = {
    name: POINTWISE[name] if meaning is None else _compile(ast.parse(meaning, mode="eval").body, meaning)
    for name, meaning in ACTIVATIONS.items()
}
POINTWISE |= {name: function for name, function in NAMES.items() if name != "identity"}
_COMPILED: dict[str, Activation] = dict(NAMES)
