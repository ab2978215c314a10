"""A call of `acm::gated_learners` with a norm: the gate's kernel and the rows' kernel both normalise as they read x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.ops import weights_of
from acm_compiler.acm.reference import Norm
from acm_compiler.codegen.gpu.gate_kernel import run_gate
from acm_compiler.codegen.gpu.launch import run
from acm_compiler.codegen.gpu.stages import Machine


def run_normed(
    tensors: Sequence[Tensor | None], *, form: str, act: str, eps: float, choices: dict[str, Any], machine: Machine
) -> Tensor:
    """learners(z, gate(z)) + residual with z = LayerNorm(x), [T, O]; `tensors` are the operator's arguments."""
    x, *given = tensors
    gate, (knob, k_lo, k_hi) = given[:4], given[4:7]
    residual, weight, bias = (*given[14:], None, None, None)[:3]
    assert x is not None and knob is not None
    knob = knob.view(torch.float32) if knob.dtype == torch.int32 else knob
    norm = Norm(weight=weight, bias=bias, eps=eps)
    k = run_gate(x, gate, (knob, k_lo, k_hi), **choices, machine=machine, norm=norm)  # type: ignore[arg-type]
    return run(x, k, weights_of(given[7:14], form, act), residual=residual, norm=norm, machine=machine)
