"""Check, once all passes are done, that every ACM of a graph is still there, and describe its call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from acm_compiler.errors import VerificationFailed
from acm_compiler.passes.lower.acm_nodes import (
    NORM_EPS,
    acm_nodes,
    call_of,
    gate_of,
    line_of,
    site_of,
    value_of,
)

_REPORT = "report it with the files of ACM_DUMP=folder; the model runs without passes: torch.compile(model)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCall:
    """Call of a gate's kernel: the type of its weights and the width of its hidden layer."""

    dtype: torch.dtype
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call of the kernels: form, activation, type of the tokens and of their device, shape of w_in;
    is_quantized: its learners' weights are.

    gate: None where it is no operator, as with budgets of examples: plain operations, which Inductor compiles.
    """

    form: str
    act: str
    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]
    is_quantized: bool = False
    gate: GateCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """One ACM of a compiled graph: what runs it, and the `reason` where plain operations run it or its gate.

    implementation: a kernel's name, "reference", or a kernel's name and ", gate by reference".
    """

    site: str
    implementation: str
    reason: str | None
    fused: tuple[str, ...]
    line: str | None


Choose = Callable[[Call], tuple[str, str | None]]


def verify(graph: fx.Graph, choose: Choose, *, expected: int) -> tuple[Lowered, ...]:
    """Every ACM of `graph`, `expected` of them, with what `choose` says runs it.

    VerificationFailed when passes lost an ACM or left a graph that is not well formed.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise VerificationFailed("the passes left a graph that is not well formed", found=error, fix=_REPORT) from error
    nodes = acm_nodes(graph)
    if len(nodes) != expected:
        raise VerificationFailed(
            "the passes changed the number of ACMs", found=len(nodes), expected=expected, fix=_REPORT
        )
    return tuple(_lowered(node, choose) for node in nodes)


def _lowered(node: fx.Node, choose: Choose) -> Lowered:
    operands = call_of(node)
    x, w_in = value_of(operands.x), value_of(operands.w_in)
    if x is None:
        raise VerificationFailed("an ACM reads what is no tensor", where=site_of(node), found=operands.x, fix=_REPORT)
    call = Call(
        form=str(node.kwargs["form"]),
        act=str(node.kwargs["act"]),
        dtype=x.dtype,
        device=x.device.type,
        shape=() if w_in is None else tuple(w_in.shape),
        is_quantized=operands.s_in is not None,
        gate=_gate(node),
    )
    implementation, reason = choose(call)
    return Lowered(
        site=site_of(node), implementation=implementation, reason=reason, fused=_fused(node), line=line_of(node)
    )


def _gate(node: fx.Node) -> GateCall | None:
    """The gate of an ACM, where it is an operator."""
    gate = gate_of(node)
    w_inner = None if gate is None else value_of(call_of(gate).w_inner)
    return None if w_inner is None else GateCall(dtype=w_inner.dtype, width=w_inner.shape[0])


def _fused(node: fx.Node) -> tuple[str, ...]:
    parts = {
        "norm": node.kwargs.get(NORM_EPS),
        "gate": gate_of(node),
        "residual": call_of(node).residual,
    }
    return tuple(name for name, part in parts.items() if part is not None)
