"""Linears, however they are written, and the rows of the parameters that they use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from acm_compiler.passes.capture.op_names import argument, data_operands, op_set
from acm_compiler.passes.find.values import Linear, Value, tokens_of
from acm_compiler.passes.find.weight_views import Views, WeightView, linear_ref
from acm_compiler.site import LinearRef

QUANTISED_LINEAR = "quantised linear: convert the model as it was before it was quantised"
OWN_BIAS = "its bias is computed (merge or remove what computes it)"
SEVERAL_MATRICES = "mixture of experts: its parameter holds several matrices; experts are not converted"
_BUFFER = "its weight is a buffer, and only parameters are converted: register it as a parameter"
_FUSED_BIAS = op_set("matmul mm einsum inner tensordot")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """`x` times `weight`, whose axis `out_axis` is the output; `problem` where it is no plain linear."""

    x: fx.Node
    weight: fx.Node
    out_axis: int = 1
    bias: fx.Node | None = None
    problem: str | None = None


def resolve_linear(value: Value, values: Mapping[str, Value], views: Mapping[str, Views]) -> Linear | None:
    """The linear that `value` is, or None when it is none: no product, or a product of two live values."""
    product = _product(value, values, views)
    if product is None:
        return None
    x, behind = values[product.x.name], _registered_behind(values[product.weight.name], values)
    if behind is None:
        return None
    ref = _ref(value, product, behind, values, views)
    x_shape, shape = x.shape or (0,), value.shape or (0,)
    return Linear(
        name=value.name,
        x=x.name,
        d_in=x_shape[-1],
        d_out=shape[-1],
        tokens=tokens_of(x_shape),
        nodes=(value.name,),
        weight=str(behind.node.meta.get("param") or behind.name),
        ref=None if isinstance(ref, str) else ref,
        problem=ref if isinstance(ref, str) else None,
        own_bias=_has_own_bias(product, views),
    )


def _has_own_bias(product: _Product, views: Mapping[str, Views]) -> bool:
    """True if a bias is added that is not, or not as a whole, a parameter or rows of one."""
    return product.bias is not None and not isinstance(views.get(product.bias.name), WeightView)


def _ref(
    value: Value, product: _Product, behind: Value, values: Mapping[str, Value], views: Mapping[str, Views]
) -> LinearRef | str:
    """The rows of parameters that a product multiplies by and adds; else the reason why no ACM can replace it."""
    weight, bias = values[product.weight.name], product.bias
    if not values[product.x.name].live:
        return "its input does not depend on the model's inputs"
    if _is_quantised(behind):
        return QUANTISED_LINEAR
    if not weight.learned:
        return _BUFFER
    if product.problem is not None:
        return product.problem
    view, bias_view = views.get(weight.name), None if bias is None else views.get(bias.name)
    if not isinstance(view, WeightView):
        return _opaque_weight(behind)
    if bias is not None and _has_own_bias(product, views) and (value.op != "linear" or values[bias.name].live):
        return OWN_BIAS
    ref = linear_ref(view, product.out_axis, bias_view if isinstance(bias_view, WeightView) else None)
    if not isinstance(ref, str) and behind.dtype != weight.dtype:
        return f"its weight is {behind.dtype} and used as {weight.dtype}; an ACM computes in the type of its weights"
    return ref


def _product(value: Value, values: Mapping[str, Value], views: Mapping[str, Views]) -> _Product | None:
    node = value.node
    found: _Product | None
    if value.op == "linear":
        found = _Product(
            x=argument(node, 0, "input"),
            weight=argument(node, 1, "weight"),
            out_axis=0,
            bias=argument(node, 2, "bias"),
        )
    elif value.op == "addmm":
        found = _Product(x=argument(node, 1, "mat1"), weight=argument(node, 2, "mat2"), bias=argument(node, 0, "input"))
        if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
            found = dataclasses.replace(found, problem="addmm scales its operands")
    elif value.op in ("matmul", "mm", "bmm", "baddbmm", "grouped_mm"):
        found = _matrix_product(value, values, views)
    elif value.op == "einsum":
        found = None if scales_only(node) else _einsum(value, values, views)
    elif value.op in ("inner", "tensordot"):
        found = _contraction(value, values)
    else:
        return None
    if found is None:
        return None
    weight = values[found.weight.name]
    behind = _registered_behind(weight, values)
    if behind is None or not (weight.learned or value.op == "linear" or _is_quantised(behind)):
        return None
    if weight.live:  # rows picked by data, as experts are, or a weight made from the input
        problem = _opaque_weight(behind)
        return dataclasses.replace(found, problem=problem) if value.op in ("linear", "addmm") else None
    return found


def _matrix_product(value: Value, values: Mapping[str, Value], views: Mapping[str, Views]) -> _Product | None:
    """A product with a matrix on the right; with anything else only where that is a parameter itself."""
    operands = data_operands(value.node)
    if len(operands) < 2:
        return None
    left, right = operands[1:3] if value.op == "baddbmm" else operands[:2]
    if not values[right.name].live and (values[right.name].learned or _is_quantised_matrix(values[right.name], values)):
        if len(values[right.name].shape or ()) == 2:
            return _Product(x=left, weight=right)
        return _Product(x=left, weight=right, problem=SEVERAL_MATRICES) if right.name in views else None
    problem = "its weight multiplies from the left, which mixes tokens"
    return _Product(x=right, weight=left, problem=problem) if left.name in views else None


def scales_only(einsum: fx.Node) -> bool:
    """True if the einsum multiplies entries and sums none up, as in `bsd,d->bsd`: one operand has the result's axes."""
    equation = argument(einsum, 0, "equation")
    inputs, arrow, output = str(equation).replace(" ", "").partition("->")
    terms = inputs.split(",")
    return bool(arrow) and len(terms) == 2 and output in terms and set(inputs) <= {*output, ","}


def _einsum(value: Value, values: Mapping[str, Value], views: Mapping[str, Views]) -> _Product | None:
    equation = argument(value.node, 0, "equation")
    operands: list[Any] = list(value.node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    inputs, arrow, output = equation.replace(" ", "").replace("...", "_").partition("->")
    terms = inputs.split(",")
    lives = [values[o.name].live for o in operands]
    if lives[0] == lives[1] and not (lives[0] is False and values[operands[1].name].learned):
        return None
    x, weight = (0, 1) if lives[0] or not lives[1] else (1, 0)
    xs, ws = terms[x], terms[weight]
    if len(ws) != 2:
        if operands[weight].name not in views:
            return None  # computed from parameters, as learned queries are: no weight, but a value like another
        problem = f"its einsum weight has {len(ws)} dimensions; write it as a matrix [out, in]"
        return _Product(x=operands[x], weight=operands[weight], problem=problem)
    contracted = xs[-1]
    out = ws.replace(contracted, "")
    plain = bool(arrow) and len(out) == 1 and out not in xs and output == xs[:-1] + out
    moved = None if plain else "its einsum moves axes; write it as a linear over the last axis"
    return _Product(x=operands[x], weight=operands[weight], out_axis=ws.find(out[:1]), problem=moved)


def _contraction(value: Value, values: Mapping[str, Value]) -> _Product | None:
    """`inner(x, weight)`, or `tensordot` of x over its last axis."""
    x, weight = data_operands(value.node)[:2]
    if len(values[weight.name].shape or ()) != 2:
        return None
    of_x, of_weight = _contracted(value.node) if value.op == "tensordot" else ([-1], [-1])
    if list(of_x) not in ([-1], [len(values[x.name].shape or ()) - 1]):
        return _Product(x=x, weight=weight, problem="its tensordot moves axes; write it as a linear over the last axis")
    return _Product(x=x, weight=weight, out_axis=1 - of_weight[0] % 2)


def _contracted(tensordot: fx.Node) -> Sequence[Sequence[int]]:
    """The axes of both operands that a tensordot sums over: `dims=1` means ([-1], [0])."""
    dims = argument(tensordot, 2, "dims", 2)
    return (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims


def _registered_behind(weight: Value, values: Mapping[str, Value]) -> Value | None:
    """A parameter that `weight` is made of, the first one found; else a buffer; None where it is made of neither."""
    while weight.node.op != "get_attr":
        made_of = [values[arg] for arg in weight.args]
        found = next((v for v in made_of if v.learned), None) or next((v for v in made_of if not v.live), None)
        if found is None:
            return None
        weight = found
    return weight if weight.node.meta.get("param") is not None else None


def _is_quantised(registered: Value) -> bool:
    return registered.dtype in (torch.int8, torch.uint8)


def _is_quantised_matrix(weight: Value, values: Mapping[str, Value]) -> bool:
    behind = _registered_behind(weight, values)
    return behind is not None and _is_quantised(behind)


def _opaque_weight(parameter: Value) -> str:
    if len(parameter.shape or ()) > 2:
        return SEVERAL_MATRICES
    return "its weight is computed from parameters (merge or remove what computes it)"


def fuse_bias(linear: Linear, consumers: list[str], values: Mapping[str, Value], views: Mapping[str, Views]) -> Linear:
    """`linear` with the parameter that its only consumer adds as its bias, where both run in one module."""
    if values[linear.name].op not in _FUSED_BIAS or linear.ref is None or linear.ref.bias or len(consumers) != 1:
        return linear
    add = values[consumers[0]]
    if add.op != "add" or len(add.args) != 2 or add.stack != values[linear.name].stack:
        return linear
    if add.node.kwargs.get("alpha", 1) != 1:
        return linear
    bias = views.get(next((a for a in add.args if a != linear.name), ""))
    if not isinstance(bias, WeightView) or bias.shape != (linear.d_out,) or bias.rows(0) != linear.ref.rows:
        return linear
    ref = dataclasses.replace(linear.ref, bias=bias.param)
    return dataclasses.replace(linear, name=add.name, nodes=(*linear.nodes, add.name), ref=ref)
