"""Multiply-adds of each operation, by torch's own count (FlopCounterMode halved)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from acm_compiler.passes.capture.graph import Capture, leaves
from acm_compiler.passes.capture.op_names import (
    ATTENTION,
    CONVOLUTIONS,
    COPIES,
    MOVES,
    RESHAPES,
    argument,
    data_operands,
    op_name,
    op_set,
)

Shape = tuple[int, ...]
_BOOKKEEPING = COPIES | RESHAPES | MOVES | op_set("result cat stack overwritten setitem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation: its name as `op_name` gives it, its arguments (nodes or tensors), and its result's shape."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Multiply-adds of an operation, or of a part of one.

    `rows`: how many vectors of the whole batch meet one matrix, filter or the like; 0 for products of two values per
    example, such as attention's, whose `lengths` are the sizes among which numbers of tokens may be.
    """

    macs: int
    rows: int = 0
    lengths: tuple[int, ...] = ()


def work_of(call: Call) -> tuple[Work, ...]:
    """The multiply-adds of one operation, empty for one that does none that torch counts."""
    count = _COUNTS.get(call.name)
    return () if count is None else tuple(work for work in count(call) if work.macs)


def does_macs(name: str) -> bool:
    """True if operations of that name do multiply-adds that torch counts."""
    return name in _COUNTS


def count_macs(capture: Capture) -> dict[str, int]:
    """Multiply-adds per captured node that does any, as torch counts them on the dense model.

    Linears, products of matrices (einsum by its contraction), convolutions and scaled_dot_product_attention
    (whole, also where it is causal); `not_counted` lists what else ran.
    """
    macs = {}
    for node in capture.graph.nodes:
        if node.op == "call_function":
            call = Call(name=op_name(node), args=node.args, kwargs=node.kwargs, shape=_shape(node))
            if number := sum(work.macs for work in work_of(call)):
                macs[node.name] = number
    return macs


def not_counted(capture: Capture) -> dict[str, int]:
    """Number of runs of each operation that computes new numbers and counts no multiply-adds, the commonest first.

    The softmax inside scaled_dot_product_attention is one of them.
    """
    ops: Counter[str] = Counter()
    for node in capture.graph.nodes:
        if node.op != "call_function" or node.meta.get("const"):
            continue
        name = op_name(node)
        if name in ATTENTION:
            ops["softmax"] += 1
        elif name not in _BOOKKEEPING | _COUNTS.keys() and _computes(node):
            ops[name] += 1
    return dict(ops.most_common())


def _computes(node: fx.Node) -> bool:
    """True if the node makes numbers out of tensors, its results perhaps several."""
    if node.meta.get("shape") is None:
        return any(op_name(user) == "result" for user in node.users)
    dtype = node.meta.get("dtype")
    return bool(data_operands(node)) and (dtype is None or dtype.is_floating_point)


def _shape(operand: object) -> Shape:
    if isinstance(operand, fx.Node):
        return tuple(operand.meta.get("shape") or ())
    return tuple(operand.shape) if isinstance(operand, Tensor) else ()


def _operands(call: Call) -> list[Shape]:
    """The shapes of the tensor operands, in order, those in lists included."""
    return [_shape(leaf) for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, (fx.Node, Tensor))]


def _linear(call: Call) -> list[Work]:
    weight = _shape(argument(call, 1, "weight"))
    return [Work(macs=math.prod(call.shape) * weight[-1], rows=math.prod(call.shape[:-1]))]


def _quantized_linear(call: Call) -> list[Work]:
    """Outside of ACMs the operator is a linear with quantised weights: one learner, which all tokens run."""
    tokens, depth = _shape(call.args[0])
    return [Work(macs=tokens * depth * call.shape[1], rows=tokens)]


def _matmul(call: Call) -> list[Work]:
    """[..., m, k] @ [..., k, n], broadcast; products with a vector on the right are no matrix products to torch."""
    left, right = _operands(call)[:2]
    return [] if len(right) < 2 or not left else [_product(left, right, call.shape)]


def _added_matmul(call: Call) -> list[Work]:
    _, left, right = _operands(call)[:3]
    return [_product(left, right, call.shape)]


def _product(left: Shape, right: Shape, out: Shape) -> Work:
    """A product of matrices; one of two axes at most is the same for all examples."""
    macs = math.prod(out) * left[-1]
    if len(left) > 2 and len(right) > 2:
        return Work(macs=macs, lengths=(out[-2], out[-1], left[-1]))
    return Work(macs=macs, rows=macs // max(1, math.prod(right if len(right) <= 2 else left)))


def _grouped_product(call: Call) -> list[Work]:
    """A product of matrices whose rows, columns or summed axis fall into groups, each with a matrix of its own."""
    left, right = _operands(call)[:2]
    return [Work(macs=grouped_macs(left, right, call.shape), rows=math.prod(left[:-1]))]


def grouped_macs(left: Shape, right: Shape, out: Shape) -> int:
    """Multiply-adds of grouped_mm: [T, k] @ [G, k, n], [G, m, k] @ [k, T], [G, m, k] @ [G, k, n] or [m, T] @ [T, n]."""
    return math.prod(left) * right[-1] if len(left) == len(right) == 2 else math.prod(out) * left[-1]


def _einsum(call: Call) -> list[Work]:
    """Operands are contracted from left to right; a step that contracts nothing is a plain product."""
    equation = call.args[0]
    shapes = _operands(call)
    if not isinstance(equation, str) or len(shapes) < 2:
        return []
    terms, sizes, output = _labels(equation, shapes)
    works, left = [], terms[0]
    for i, right in enumerate(terms[1:], start=1):
        later = set(output).union(*terms[i + 1 :])
        left, right = (_summed(own, other, later) for own, other in ((left, right), (right, left)))
        contracted = set(left) & set(right) - later
        both = dict.fromkeys([*left, *right])
        if math.prod(sizes[label] for label in contracted) > 1:
            macs = math.prod(sizes[label] for label in both)
            shared = set(left) & set(right) - contracted
            lengths = tuple(sizes[label] for label in both if label not in shared)
            kept = math.prod(sizes[label] for label in left if label not in contracted)
            works.append(Work(macs=macs, lengths=lengths) if shared else Work(macs=macs, rows=kept))
        left = [label for label in both if label not in contracted]
    return works


def _summed(own: Sequence[str], other: Sequence[str], later: set[str]) -> list[str]:
    """The labels left after those are summed away that nothing else uses."""
    return [label for label in own if label in other or label in later]


def _labels(equation: str, shapes: Sequence[Shape]) -> tuple[list[list[str]], dict[str, int], list[str]]:
    """The labels of each operand, their sizes, and those of the result; an ellipsis counts from the right."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms: list[list[str]] = []
    sizes: dict[str, int] = {}
    for text, shape in zip(inputs.split(","), shapes, strict=True):
        before, dots, after = text.partition("...")
        hidden = len(shape) - len(before) - len(after)
        labels = [*before, *(f".{hidden - i}" for i in range(hidden if dots else 0)), *after]
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
        terms.append(labels)
    dotted = sorted((label for label in sizes if label[0] == "."), reverse=True)
    if not arrow:
        counts = Counter(label for term in terms for label in term)
        return terms, sizes, [*dotted, *sorted(k for k, n in counts.items() if n == 1 and k[0] != ".")]
    before, dots, after = output.partition("...")
    return terms, sizes, [*before, *(dotted if dots else ()), *after]


def _convolution(call: Call) -> list[Work]:
    """Each output position meets the whole filter; in a transposed convolution each input position does."""
    x, weight, out = (*_operands(call)[:2], call.shape)
    transposed = "transpose" in call.name or (
        call.name == "convolution" and bool(argument(call, 6, "transposed", False))
    )
    spatial = len(weight) - 2
    batch = out[0] if len(out) == len(weight) else 1
    positions = math.prod((x if transposed else out)[-spatial:]) * batch
    return [Work(macs=positions * math.prod(weight), rows=positions)]


def _attention(call: Call) -> list[Work]:
    query, key, value = (_shape(argument(call, i, k)) for i, k in enumerate(("query", "key", "value")))
    rows = math.prod(call.shape[:-1])  # batch x heads x queries, broadcast
    return [Work(macs=rows * key[-2] * (query[-1] + value[-1]), lengths=(query[-2], key[-2]))]


def _opaque_attention(call: Call) -> list[Work]:
    """F.multi_head_attention_forward: four projections and the attention between them."""
    query, key, value = (_shape(argument(call, i, k)) for i, k in enumerate(("query", "key", "value")))
    width, batch = query[-1], query[1] if len(query) == 3 else 1
    keys = key[0] + (argument(call, 7, "bias_k") is not None) + bool(argument(call, 9, "add_zero_attn"))
    return [
        Work(macs=batch * width * query[0] * 2 * width, rows=batch * query[0]),
        Work(macs=batch * width * key[0] * key[-1], rows=batch * key[0]),
        Work(macs=batch * width * value[0] * value[-1], rows=batch * value[0]),
        Work(macs=batch * width * 2 * query[0] * keys, lengths=(query[0], keys)),
    ]


def _inner(call: Call) -> list[Work]:
    left, right = _operands(call)[:2]
    return [Work(macs=math.prod(call.shape) * left[-1], rows=math.prod(left[:-1]))] if left and right else []


def _tensordot(call: Call) -> list[Work]:
    """One product of the flattened operands; contracted entries appear in both, so twice in their sizes."""
    left, right = _operands(call)[:2]
    out = math.prod(call.shape)
    contracted = math.isqrt(math.prod(left) * math.prod(right) // out) if out else 0
    return [Work(macs=out * contracted, rows=math.prod(left) // contracted)] if contracted else []


_COUNTS: dict[str, Callable[[Call], list[Work]]] = {
    "linear": _linear,
    "acm::learners": _quantized_linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _added_matmul,
    "baddbmm": _added_matmul,
    "grouped_mm": _grouped_product,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "inner": _inner,
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _opaque_attention,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
}
