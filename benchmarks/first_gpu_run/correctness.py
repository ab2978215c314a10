"""Outputs of the kernels: every form, tokens that are NaN, sites of full size with the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from acm_compiler.acm.arguments import GateArguments
from acm_compiler.acm.ops import cast_weights
from acm_compiler.acm.reference import run_learners
from acm_compiler.codegen.compare import TOLERANCE, relative_errors
from acm_compiler.codegen.gpu.gate_kernel import run_gate
from acm_compiler.codegen.gpu.launch import run
from benchmarks.first_gpu_run.contenders import (
    MLPS,
    PROJECTIONS,
    VIT,
    contenders,
    draw_k,
    errors_of,
    exact_answer,
    site_of,
)
from benchmarks.first_gpu_run.device import Device
from benchmarks.first_gpu_run.parts import Row
from tests.helpers.kernel_cases import FORMS, inputs_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
REPEATS = 200
CHOOSING = {"cost": 0.6, "k_min": 0, "rule": "logits"}


def forms(device: Device) -> Iterator[Row]:
    """Every form and type of learners, few tokens and sorted ones, against float64."""
    some = device.some(DTYPES), (7, 300)[: None if device.is_cuda else 1], device.some(FORMS)
    for name, tokens, case in device.mine(product(*some)):
        inputs = inputs_of(replace(case, tokens=tokens, dtype=DTYPES[name]), device.kind)
        y = run(inputs.x, inputs.k, inputs.weights, residual=inputs.residual, machine=device.machine)
        errors = relative_errors(y.cpu(), inputs.expected)
        fine = max(errors) <= TOLERANCE[DTYPES[name]]
        yield {"case": str(case), "dtype": name, "tokens": tokens, **errors._asdict(), "fine": fine}


def not_a_number(device: Device) -> Iterator[Row]:
    """Tokens whose x is NaN run all learners and give NaN, alone; the device goes on."""
    for rule in ("logits", "damage"):
        for tokens in (20, 3000 if device.is_cuda else 70):
            site = site_of(replace(VIT, tokens=tokens), device)
            x, bad = site.x.clone(), torch.tensor([0, tokens // 2, tokens - 1])
            x[bad] = torch.nan
            choosing = CHOOSING | {"rule": rule}
            clean = run_gate(site.gate, **choosing, machine=site.machine)
            call = GateArguments(x, *site.gate[1:])
            k = run_gate(call, **choosing, machine=site.machine)
            y = run(x, k, site.weights, machine=site.machine)
            device.wait()
            others = torch.ones(tokens, dtype=torch.bool).index_fill(0, bad, False)
            errors = relative_errors(y, run_learners(x.double(), k, cast_weights(site.weights, torch.float64)))
            fine = bool((k[bad] == 4).all()) and torch.equal(k[others], clean[others])
            fine = fine and max(errors) <= TOLERANCE[x.dtype]
            yield {"rule": rule, "tokens": tokens, "k of NaN": k[bad].tolist(), **errors._asdict(), "fine": fine}


def answers(device: Device) -> Iterator[Row]:
    """Sites of full size: everybody's errors per token and per block of 128 x 128, and the same bits 200 times."""
    few = replace(MLPS["Llama-8B"], tokens=1), replace(VIT, tokens=197)
    for shape in device.mine(device.some((*MLPS.values(), *few, *PROJECTIONS))):
        site = site_of(shape, device)
        for fraction in (0.5, 1.0, 0.0)[: None if device.is_cuda else 1]:
            k = draw_k(site, fraction)
            calls = contenders(site, fraction, k)
            errors = errors_of(calls, exact_answer(site, k))
            first, repeats = calls["ours"](), REPEATS if device.is_cuda else 1
            odd = sum(not torch.equal(calls["ours"](), first) for _ in range(repeats))
            for name, error in errors.items():
                ours = name.startswith("ours")
                fine = not ours or (odd == 0 and max(error) <= TOLERANCE[torch.bfloat16])
                facts = {"site": shape.name, "tokens": site.shape.tokens, "k/N": fraction, "contender": name}
                yield {**facts, **error._asdict(), "other bits": f"{odd} of {repeats}" if ours else "", "fine": fine}
