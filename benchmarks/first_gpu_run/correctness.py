"""Outputs of the kernels: every form, tokens that are NaN, gates, sites of full size with the same bits every time; and
those of ACMs whose tokens all run one k, by dense products or, of one token, by its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from acm_compiler.acm import ACM, context
from acm_compiler.acm.arguments import GateArguments
from acm_compiler.acm.learners import Gate, Learners
from acm_compiler.acm.ops import cast_weights
from acm_compiler.acm.reference import run_learners, utilities
from acm_compiler.codegen.compare import TOLERANCE, relative_errors
from acm_compiler.codegen.gpu.gate_plan import run_gate
from acm_compiler.codegen.gpu.launch import run
from acm_compiler.codegen.gpu.stages import Machine
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
from tests.helpers.kernel_cases import FORMS, WIDE, inputs_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
REPEATS = 200
CHOOSING = {"cost": 0.6, "k_min": 0, "rule": "logits"}


def forms(device: Device) -> Iterator[Row]:
    """Every form and type of learners, few tokens and sorted ones, against float64."""
    some = device.some(DTYPES), (7, 300)[: None if device.is_cuda else 1], device.some(FORMS)
    cases = [(*case, device.machine) for case in product(*some)]
    if device.machine.turns:  # one program has tiles enough for both groups of warps
        cases += [(*case, one_processor(device)) for case in product(("bf16", "fp16"), (1, 300, 3000), WIDE)]
    for name, tokens, case, machine in device.mine(cases):
        inputs = inputs_of(replace(case, tokens=tokens, dtype=DTYPES[name]), device.kind)
        y = run(inputs.x, inputs.k, inputs.weights, residual=inputs.residual, machine=machine)
        errors = relative_errors(y.cpu(), inputs.expected)
        fine = max(errors) <= TOLERANCE[DTYPES[name]]
        facts = {"case": str(case), "dtype": name, "tokens": tokens, "processors": machine.processors}
        yield {**facts, **errors._asdict(), "fine": fine}


def one_processor(device: Device) -> Machine:
    """The device, as if it had one multiprocessor: calls of any size fill it."""
    return replace(device.machine, processors=1)


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


def gates(device: Device) -> Iterator[Row]:
    """Gates of every width, of few tokens and of many: what their choices lose in float64."""
    sizes, counts = ((432, 4096), (64, 768), (1000, 2048)), (1, 64, 3000)
    if not device.is_cuda:
        sizes, counts = ((270, 1030), (20, 70)), (1, 70)
    for (width, d), tokens in product(sizes, counts):
        draw = [torch.randn(size, device=device.kind) for size in ((tokens, d), (width, d), (width,), (5, width), (5,))]
        x, *weights = ((tensor / tensor.shape[-1] ** 0.5).bfloat16() for tensor in draw)
        knob, bounds = (
            torch.tensor(0.1, device=device.kind),
            (torch.tensor(k, device=device.kind).int() for k in (0, 4)),
        )
        k = run_gate(GateArguments(x, *weights, knob, *bounds), **CHOOSING, machine=device.machine)
        w, b, w2, b2 = (tensor.double() for tensor in weights)
        price = CHOOSING["cost"] * torch.arange(5, device=device.kind)
        u = utilities(F.linear(F.gelu(F.linear(x.double(), w, b)), w2, b2), knob, price, CHOOSING["rule"])
        lost = float((u.max(1).values - u.gather(1, k.long()[:, None])[:, 0]).max())
        yield {"width": width, "tokens": tokens, "lost": lost, "fine": lost <= 3e-2}


def one_k(device: Device) -> Iterator[Row]:
    """ACMs whose tokens all run one k, many tokens and one: compiled, and how many graphs serve every k, and eager."""
    context.DENSE_PREFIXES.add(device.kind)  # as those of a GPU do
    backend = "acm" if device.is_cuda else "eager"  # a dry run only traces
    for form, act in device.mine(device.some({"mlp": "gelu", "gated": "silu", "linear": "identity"}.items())):
        d, width, many = (768, 768, 3000) if device.is_cuda else (24, 8, 20)
        learners = Learners(d, d, 4, width, form=form, act=act, bias_in=form == "mlp", dtype=torch.bfloat16)
        learners.start_random()
        learners.b_out.normal_()
        options = {"name": form, "k_min": 0, "layout": None, "cost": 1.0, "dropout": 0.0}
        site = ACM(Gate(d, 64, 5, dtype=torch.bfloat16), learners, **options).to(device.kind).eval()
        exact = cast_weights(learners.weights(), torch.float64)
        for tokens in (many, 1):
            x = torch.randn(tokens, d, device=device.kind).bfloat16()
            torch._dynamo.reset()
            graphs, compiled = counters["stats"]["unique_graphs"], torch.compile(site, backend=backend, fullgraph=True)
            for k in (4, 2, 0, 3, 1):
                site.set_choices(knob=0.0, k_lo=k, k_hi=k)
                expected = run_learners(x.double(), torch.full((tokens,), k, device=device.kind).int(), exact)
                ways = {"compiled": compiled, "eager, first": site, "eager": site}
                for way, call in ways.items():
                    errors = relative_errors(call(x), expected)
                    made = counters["stats"]["unique_graphs"] - graphs
                    fine = max(errors) <= TOLERANCE[x.dtype] and made <= 3
                    facts = {"form": form, "tokens": tokens, "k": k, "way": way}
                    yield {**facts, **errors._asdict(), "graphs": made, "fine": fine}


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
