"""How many multiply-adds each operation of a capture does, by torch's own count (FlopCounterMode halved)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from torch import fx

from acm_compiler.passes.captured import Capture
from acm_compiler.passes.op_names import (
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


def count_macs(capture: Capture) -> dict[str, int]:
    """Multiply-adds per captured node that does any, as torch counts them on the dense model.

    Linears, products of matrices (einsum by its contraction), convolutions and scaled_dot_product_attention
    (whole, also where it is causal); `not_counted` lists what else ran.
    """
    macs = {}
    for node in capture.graph.nodes:
        count = _COUNTS.get(op_name(node)) if node.op == "call_function" else None
        if count is not None and (number := count(node)):
            macs[node.name] = number
    return macs


def not_counted(capture: Capture) -> dict[str, int]:
    """How often each operation runs that computes new numbers and counts no multiply-adds, the commonest first.

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
    """Whether the node makes numbers out of tensors, its results perhaps several."""
    if node.meta.get("shape") is None:
        return any(op_name(user) == "result" for user in node.users)
    dtype = node.meta.get("dtype")
    return bool(data_operands(node)) and (dtype is None or dtype.is_floating_point)


def _shape(operand: object) -> Shape:
    shape = operand.meta.get("shape") if isinstance(operand, fx.Node) else None
    return tuple(shape or ())


def _operands(node: fx.Node) -> list[Shape]:
    """The shapes of the tensor operands, in order, those in lists included."""
    return [_shape(operand) for operand in data_operands(node)]


def _linear(node: fx.Node) -> int:
    weight = _shape(argument(node, 1, "weight"))
    return math.prod(_shape(node)) * weight[-1]


def _matmul(node: fx.Node) -> int:
    """[..., m, k] @ [..., k, n], broadcast; products with a vector on the right are no matrix products to torch."""
    left, right = _operands(node)[:2]
    if op_name(node) == "rmatmul":
        left, right = right, left
    return 0 if len(right) < 2 or not left else math.prod(_shape(node)) * left[-1]


def _added_matmul(node: fx.Node) -> int:
    return math.prod(_shape(node)) * _operands(node)[1][-1]


def _einsum(node: fx.Node) -> int:
    """Operands are contracted from left to right; a step that contracts nothing is a plain product."""
    equation = node.args[0]
    shapes = _operands(node)
    if not isinstance(equation, str) or len(shapes) < 2:
        return 0
    terms, sizes, output = _labels(equation, shapes)
    total, left = 0, terms[0]
    for i, right in enumerate(terms[1:], start=1):
        later = set(output).union(*terms[i + 1 :])
        left, right = (_summed(own, other, later) for own, other in ((left, right), (right, left)))
        contracted = set(left) & set(right) - later
        both = dict.fromkeys([*left, *right])
        if math.prod(sizes[label] for label in contracted) > 1:
            total += math.prod(sizes[label] for label in both)
        left = [label for label in both if label not in contracted]
    return total


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


def _convolution(node: fx.Node) -> int:
    """Each output position meets the whole filter; in a transposed convolution each input position does."""
    x, weight, out = (*_operands(node)[:2], _shape(node))
    name = op_name(node)
    transposed = "transpose" in name or (name == "convolution" and bool(argument(node, 6, "transposed", False)))
    spatial = len(weight) - 2
    batch = out[0] if len(out) == len(weight) else 1
    return math.prod((x if transposed else out)[-spatial:]) * math.prod(weight) * batch


def _attention(node: fx.Node) -> int:
    query, key, value = (_shape(argument(node, i, k)) for i, k in enumerate(("query", "key", "value")))
    rows = math.prod(_shape(node)[:-1])  # batch x heads x queries, broadcast
    return rows * key[-2] * (query[-1] + value[-1])


def _opaque_attention(node: fx.Node) -> int:
    """F.multi_head_attention_forward: four projections and the attention between them."""
    query, key, value = (_shape(argument(node, i, k)) for i, k in enumerate(("query", "key", "value")))
    width, batch = query[-1], query[1] if len(query) == 3 else 1
    keys = key[0] + (argument(node, 7, "bias_k") is not None) + bool(argument(node, 9, "add_zero_attn"))
    projected = query[0] * 2 * width + key[0] * key[-1] + value[0] * value[-1]
    return batch * width * (projected + 2 * query[0] * keys)


def _inner(node: fx.Node) -> int:
    left, right = _operands(node)[:2]
    return math.prod(_shape(node)) * left[-1] if left and right else 0


def _tensordot(node: fx.Node) -> int:
    """One product of the flattened operands; contracted entries appear in both, so twice in their sizes."""
    left, right = _operands(node)[:2]
    out = math.prod(_shape(node))
    return out * math.isqrt(math.prod(left) * math.prod(right) // out) if out else 0


_COUNTS: dict[str, Callable[[fx.Node], int]] = {
    "linear": _linear,
    "matmul": _matmul,
    "rmatmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _added_matmul,
    "baddbmm": _added_matmul,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "inner": _inner,
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _opaque_attention,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
}
