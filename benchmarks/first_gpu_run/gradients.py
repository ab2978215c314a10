"""Gradients of the kernels: forms with one second layer, fixed and relaxed choices, the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from acm_compiler.acm.reference import relaxed_output
from acm_compiler.codegen.compare import TOLERANCE
from acm_compiler.codegen.gpu.gradients.launch import run_backward
from acm_compiler.codegen.gpu.launch import SortedPlan
from acm_compiler.codegen.gpu.spec import spec_of
from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.codegen.gpu.tiles import bucket_of, choose_tiles
from benchmarks.first_gpu_run.correctness import DTYPES, one_processor
from benchmarks.first_gpu_run.device import Device
from benchmarks.first_gpu_run.parts import Row
from tests.helpers.kernel_cases import WIDE, Case, Inputs, inputs_of, to

REPEATS = 50
SORTED = 128  # so many tokens are sorted
CASES = (
    Case(),
    Case(form="gated", act="silu"),
    Case(form="linear", act="identity", bias=False),
    Case(k="one"),
    Case(k="none"),
    Case(learners=8, width=24, d_in=64, d_out=160),
)


def exact(device: Device) -> Iterator[Row]:
    """Largest relative norm of the difference of a gradient from float64's, over x, nu and weights."""
    tokens = (1, 300, 5000) if device.is_cuda else (40,)
    cases = [(*case, device.machine) for case in product(device.some(DTYPES), tokens, device.some(CASES))]
    if device.machine.turns:
        cases += [(*case, one_processor(device)) for case in product(("bf16", "fp16"), (1, 300, 3000), WIDE)]
    for name, count, case, machine in device.mine(cases):
        case = replace(case, tokens=count, dtype=DTYPES[name], residual=False)
        inputs, dy = inputs_of(case, device.kind), torch.randn(count, case.d_out).to(case.dtype)
        leaves = {key: t.double().cpu() for key, t in inputs.weights.tensors._asdict().items() if t is not None}
        chosen = F.one_hot(inputs.k.long().cpu(), case.learners + 1).double()
        leaves |= {"x": inputs.x.double().cpu(), "nu": chosen}
        for leaf in leaves.values():
            leaf.requires_grad_()
        weights = to(inputs.weights, "cpu")
        weights = replace(weights, **{key: leaf for key, leaf in leaves.items() if key not in ("x", "nu")})
        y = relaxed_output(leaves["x"], chosen, weights, 0)
        expected = torch.autograd.grad(y, list(leaves.values()), dy.double(), allow_unused=True)
        for relaxed, keeps in ((False, False), (False, True), (True, False)):
            wanted = set(leaves) - (set() if relaxed else {"nu"})
            given = dy.to(device.kind), inputs.x, inputs.k, inputs.weights
            options = {"wanted": wanted, "machine": machine, "choice": (torch.float32, 0) if relaxed else None}
            if keeps:
                options |= _kept(inputs, machine)
            found = run_backward(*given, **options)
            errors = {
                key: float((found[key].double().cpu() - (0 if grad is None else grad)).norm())
                / max(1e-9, 0.0 if grad is None else float(grad.norm()))
                for key, grad in zip(leaves, expected, strict=True)
                if key in wanted and found[key].numel()
            }
            repeats = REPEATS if device.is_cuda else 1
            again = (run_backward(*given, **options) for _ in range(repeats))
            odd = sum(any(not torch.equal(found[key], other[key]) for key in wanted) for other in again)
            worst = max(errors, key=lambda key: errors[key])
            facts = {"case": str(case), "dtype": name, "tokens": count, "processors": machine.processors}
            facts |= {"relaxed": relaxed, "kept": keeps}
            fine = errors[worst] <= 4 * TOLERANCE[case.dtype] and not odd
            yield {**facts, "worst": worst, "error": errors[worst], "other bits": f"{odd} of {repeats}", "fine": fine}


def _kept(inputs: Inputs, machine: Machine) -> dict[str, Any]:
    """Options of a backward whose forward kept its first layer, however few its tokens are."""
    spec, tokens = spec_of(inputs.x, inputs.weights, None), len(inputs.x)
    tiles = choose_tiles(spec, machine.arch, max(tokens, SORTED), machine.processors, turns=machine.turns)
    facts = {"machine": machine, "tiles": tiles, "bucket": bucket_of(tokens)}
    plan = SortedPlan(spec, inputs.weights, **facts)
    order = plan.order(inputs.k, None, inputs.x)
    _, kept = plan.keeping(inputs.x, inputs.k, order)
    return {"order": order, "kept": kept}
