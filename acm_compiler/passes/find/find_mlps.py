"""Finds MLPs: two linears with pointwise operations between them, and nothing else reading what is hidden.

plain: w2(act(w1(x)))    gated: w3(act(w1(x)) * w2(x))    packed: a, b = w12(x).chunk(2); w3(act(a) * b)
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

from torch import nn

from acm_compiler.passes.capture.op_names import (
    ACTIVATIONS,
    ATTENTION,
    COPIES,
    MOVES,
    NORMS,
    PACKING,
    PRODUCTS,
    RESHAPES,
    SCALES,
    SUMS,
    op_set,
)
from acm_compiler.passes.find.activation import Call, Inexpressible, Leaf, Term, TermReader, is_affine, leaves, text
from acm_compiler.passes.find.dataflow import Dataflow
from acm_compiler.passes.find.linears import OWN_BIAS
from acm_compiler.passes.find.values import LookAlike, Region, Value, tokens_of
from acm_compiler.site import LinearRef

_CHOICES = frozenset(["where", "masked_fill"])
_COMPARISONS = op_set("gt lt ge le eq ne greater less logical_and logical_or logical_not")
_POINTWISE = ACTIVATIONS | SCALES | SUMS | COPIES | RESHAPES | PACKING | _CHOICES | _COMPARISONS | {"result"}
_BARRIERS = ATTENTION | PRODUCTS | {"softmax", "multi_head_attention_forward"}


@dataclass(slots=True, kw_only=True)
class _Hidden:
    """Operations above the last linear, down to the linears that feed it."""

    values: list[str] = field(default_factory=list)
    frontier: list[str] = field(default_factory=list)
    norms: list[Value] = field(default_factory=list)
    foreign: list[Value] = field(default_factory=list)
    activated: bool = False


def find_mlps(flow: Dataflow, model: nn.Module) -> tuple[list[Region], list[LookAlike]]:
    """Every run of an MLP in `flow`, and what looks like one; linears may be in several look-alikes."""
    found: list[Region] = []
    others: list[LookAlike] = []
    reader = TermReader(flow, model)
    for last in flow.linears:
        hidden = _hidden_above(flow, last)
        inputs = set() if hidden is None else {flow.root(flow.linears[f].x) for f in hidden.frontier}
        if hidden is None or not hidden.activated or len(inputs) != 1:
            continue
        refusal = _refusal(flow, hidden, last)
        region = _region(flow, hidden, last, reader) if refusal is None else refusal
        if isinstance(region, Region):
            found.append(region)
        elif region is not None:
            others.append(LookAlike(linears=(*hidden.frontier, last), reason=region))
    return _without_chains(found, others)


def _hidden_above(flow: Dataflow, last: str) -> _Hidden | None:
    """Walks up from the input of `last` to the linears it comes from; None at attention and above a third linear."""
    # `down(gelu(up(x)))`, `down(silu(gate(x)) * up(x))`, `a, b = w(x).chunk(2, -1); down(silu(a) * b)`
    hidden, todo, seen = _Hidden(), [flow.linears[last].x], set()
    while todo:
        name = todo.pop()
        value = flow.values[name]
        if name in seen or not value.live:
            continue
        seen.add(name)
        if name in flow.linears:
            hidden.frontier.append(name)
        if value.op in _BARRIERS or len(hidden.frontier) > 2:
            return None
        if name in flow.linears:
            continue
        hidden.values.append(name)
        live = flow.live_args(name)
        if value.op in NORMS:
            hidden.norms.append(value)
        elif value.op not in _POINTWISE or (value.op == "result" and flow.values[value.args[0]].op not in PACKING):
            hidden.foreign.append(value)
        hidden.activated |= value.op in ACTIVATIONS or (value.op == "mul" and len(live) == 2)
        todo += live
    hidden.frontier.sort(key=flow.position.__getitem__)
    return hidden


def _refusal(flow: Dataflow, hidden: _Hidden, last: str) -> str | None:
    """Reason why an ACM cannot replace the candidate, seen from its operations alone; None where it can."""
    linears = [flow.linears[name] for name in (*hidden.frontier, last)]
    problem = next((linear.problem for linear in linears if linear.problem), None)
    if problem:
        return problem
    if any(linear.own_bias for linear in linears):
        return OWN_BIAS
    types = dict.fromkeys(str(flow.values[linear.name].dtype) for linear in linears)
    if len(types) > 1:
        return f"its layers compute in different types: {', '.join(types)}; an ACM computes in one"
    if hidden.norms:
        return f"norm over the hidden axis: {hidden.norms[0].name}{hidden.norms[0].place}; learners cannot share it"
    choice = next((v for v in map(flow.values.__getitem__, hidden.values) if v.op in _CHOICES), None)
    if choice:
        where = f"{choice.name}{choice.place}"
        return f"{where} chooses between hidden values by data; an ACM holds a fixed pointwise function"
    if hidden.foreign:
        op = next((v for v in hidden.foreign if v.op not in MOVES), hidden.foreign[0])
        return f"op between the linears is not element-wise: {op.name}{op.place}"
    inner = dict.fromkeys([*hidden.frontier, *hidden.values])
    for name in inner:
        if name in flow.outputs:
            return "hidden value is also returned by the model; an ACM needs a single exit"
        reader = next((u for u in flow.consumers(name) if u not in inner and u != last), None)
        if reader is not None:
            return f"hidden value is also read by {reader}{flow.values[reader].place}; an ACM needs a single exit"
    return None


def _region(flow: Dataflow, hidden: _Hidden, last: str, reader: TermReader) -> Region | str | None:
    """The MLP that ends in `last`, or why it is none, or None when it does not even look like one."""
    try:
        term = reader.term(flow.linears[last].x)
    except Inexpressible as reason:
        return f"activation cannot be written down: {reason}"
    shown = leaves(term)
    if len(shown) == 1:
        activation = text(term)
        if is_affine(activation):
            return None
        refs: tuple[LinearRef, ...] | str = _refs(flow, shown)
    elif len(shown) == 2:
        gated = _gated(term, shown)
        if isinstance(gated, str):
            return gated
        activation, shown = gated
        refs = _refs(flow, shown)
    else:
        return f"the last linear reads {len(shown)} different parts of the hidden value"
    if isinstance(refs, str):
        return refs
    return _build(flow, hidden, last, refs, activation)


def _gated(term: Term, shown: list[Leaf]) -> tuple[str, list[Leaf]] | str:
    """(activation, [activated leaf, multiplied leaf]) of `act(a) * b`."""
    # `0.5 * silu(a) * b`, in any order and nesting: numbers belong to the activation
    factors = _factors(term)
    by_leaf = {leaf: [f for f in factors if leaves(f) == [leaf]] for leaf in shown}
    if any(len(leaves(f)) > 1 for f in factors):
        return "its two branches are combined by more than a product"
    numbers = [f for f in factors if not leaves(f)]
    for activated, multiplied in (shown, shown[::-1]):
        if by_leaf[multiplied] == [multiplied]:
            activation = numbers + by_leaf[activated]
            product = activation[0]
            for factor in activation[1:]:
                product = Call("mul", (product, factor))
            return text(product), [activated, multiplied]
    return "both branches of the gated MLP have an activation; an ACM holds act(a) * b"


def _factors(term: Term) -> list[Term]:
    """The factors of a product, nested products, negations and divisions by numbers opened."""
    if isinstance(term, Call) and term.function == "mul":
        return [factor for operand in term.operands for factor in _factors(operand)]
    if isinstance(term, Call) and term.function == "neg":
        return [-1.0, *_factors(term.operands[0])]
    if isinstance(term, Call) and term.function == "div" and isinstance(term.operands[1], float):
        return [*_factors(term.operands[0]), 1.0 / term.operands[1]]
    return [term]


def _refs(flow: Dataflow, shown: list[Leaf]) -> tuple[LinearRef, ...] | str:
    """The matrices behind the leaves: whole linears, or the two halves of one."""
    refs = []
    for leaf in shown:
        linear, span = flow.linears[leaf.channels.linear], leaf.channels.span
        assert linear.ref is not None  # _refusal has seen to it
        if span is None:
            return "its packed branches are interleaved; an ACM needs each branch in one run of rows"
        if span != (0, linear.d_out):
            start = linear.ref.rows[0] if linear.ref.rows else 0
            refs.append(dataclasses.replace(linear.ref, rows=(start + span[0], start + span[1])))
        else:
            refs.append(linear.ref)
    spans = sorted(leaf.channels.span or (0, 0) for leaf in shown)
    linears = {leaf.channels.linear for leaf in shown}
    used = spans[-1][1] if len(linears) == 1 else -1
    contiguous = all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    if used >= 0 and not (spans[0][0] == 0 and contiguous and used == flow.linears[linears.pop()].d_out):
        return "only a part of the hidden value is used"
    return tuple(refs)


def _build(flow: Dataflow, hidden: _Hidden, last: str, refs: tuple[LinearRef, ...], act: str) -> Region | str:
    first, end = flow.linears[hidden.frontier[0]], flow.linears[last]
    width = end.d_in
    if end.weight in {flow.linears[name].weight for name in hidden.frontier}:
        return f"its layers share {end.weight}; learners would need one each"
    hidden_sizes = sum(flow.linears[name].d_out for name in hidden.frontier)
    if hidden_sizes != width * len(refs) or first.tokens != end.tokens:
        return "the hidden value changes its width or its tokens between the linears"
    assert end.ref is not None
    names = (*hidden.frontier, last)
    return Region(
        kind="mlp" if len(refs) == 1 else "gated_mlp",
        x=first.x,
        output=last,
        linears=names,
        first=refs,
        last=end.ref,
        act=act,
        nodes=frozenset(hidden.values).union(*(flow.linears[name].nodes for name in names)),
        d_in=first.d_in,
        d_out=end.d_out,
        dense_width=width,
        tokens=tokens_of(flow.values[first.x].shape or ()),
    )


def _without_chains(found: list[Region], others: list[LookAlike]) -> tuple[list[Region], list[LookAlike]]:
    """Drops MLPs that share a linear: three or more linears in a row, as in some heads."""
    uses: dict[str, int] = {}
    for region in found:
        for name in region.linears:
            uses[name] = uses.get(name, 0) + 1
    kept = [r for r in found if all(uses[name] == 1 for name in r.linears)]
    reason = "three or more linears in a row; an ACM replaces exactly two"
    others += [LookAlike(linears=r.linears, reason=reason) for r in found if r not in kept]
    return kept, others
