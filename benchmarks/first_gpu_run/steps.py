"""Training steps of single sites by parts: wall time, the host's, the kernels'; dense, by kernels alone, whole ACMs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from acm_compiler.acm.arguments import LearnerWeights
from acm_compiler.codegen.gpu.gradients.launch import run_backward
from benchmarks.first_gpu_run.contenders import MLPS, Site, dense_call, draw_k, learners_plan, site_of
from benchmarks.first_gpu_run.device import Calls, Device
from benchmarks.first_gpu_run.models import spread, started_us
from benchmarks.first_gpu_run.parts import Row
from benchmarks.host_time.__main__ import mlp

SHAPES = (MLPS["ViT-B"], replace(MLPS["Llama-8B"], tokens=2048), MLPS["XLS-R"])
FRACTIONS = (0.6, 0.25, 0.5, 1.0)


def sites(device: Device) -> Iterator[Row]:
    """Forward and backward of each site; kernels of the first share one by one."""
    for shape in SHAPES:
        site = site_of(shape, device)
        dy = torch.randn(site.shape.tokens, site.shape.d_out, device=device.kind).bfloat16()
        facts = {"site": site.shape.name, "tokens": site.shape.tokens}
        calls = whole_steps(site, dy, device)
        by_kernels = {
            f"kernels at {f}, no gate": kernels_step(site, dy, draw_k(site, f)) for f in device.some(FRACTIONS)
        }
        for row in spent(calls | by_kernels, device):
            yield {**facts, **row}
        for row in device.profiled(next(iter(by_kernels.values()))):
            yield {**facts, "share": FRACTIONS[0], **row}


def spent(calls: Calls, device: Device) -> Iterator[Row]:
    """Medians of all in turn: wall milliseconds with a wait behind each call, and over the first one's of the round;
    microseconds until a call returns; the sum of its kernels.
    """
    walls: dict[str, list[float]] = {name: [] for name in calls}
    hosts = {name: started_us(call, device) for name, call in calls.items()}
    for _ in range(device.rounds):
        for name, call in calls.items():
            device.wait()
            start = time.perf_counter()
            call()
            device.wait()
            walls[name].append(1e3 * (time.perf_counter() - start))
    base = next(iter(walls.values()))
    for name, call in calls.items():
        ratio = statistics.median(own / first for own, first in zip(walls[name], base, strict=True))
        wall, kernels = statistics.median(walls[name]), sum(row["us"] for row in device.profiled(call))
        yield {"contender": name, "wall_ms": wall, "ratio": ratio, "host_us": hosts[name], "kernels_us": kernels}


def whole_steps(site: Site, dy: Tensor, device: Device) -> Calls:
    """The dense layers' step, and for learners of a plain MLP that of a whole ACM, eager and compiled."""
    x = site.x.detach().requires_grad_()
    for tensor in site.weights.tensors:
        if tensor is not None:
            tensor.requires_grad_()
    dense = dense_call(site)
    calls: Calls = {"dense": lambda: torch.autograd.backward(dense(), dy)}
    if site.shape.form == "mlp":
        shape = site.shape
        acm = mlp(shape.d_in, learners=shape.learners, gate=shape.gate, width=shape.width).to(device.kind)
        with torch.no_grad():
            for parameter in acm.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            spread(acm)
        acm.gate.requires_grad_(False)
        acm.train()
        calls["ACM, eager"] = lambda: torch.autograd.backward(acm(x), dy)
        compiled = torch.compile(acm, backend="acm", fullgraph=True)
        calls["ACM, compiled"] = lambda: torch.autograd.backward(compiled(x), dy)
    return calls


def kernels_step(site: Site, dy: Tensor, k: Tensor) -> Callable[[], object]:
    """The learners' kernels forward and backward, of kept plans, without autograd."""
    weights, plan = site.weights, learners_plan(site)
    wanted = {"x", *(name for name in LearnerWeights._fields if getattr(weights, name) is not None)}

    def call() -> object:
        with torch.no_grad():
            order = plan.order(k, None, site.x)
            y, kept = plan.keeping(site.x, k, order)
            facts = {"machine": site.machine, "order": order, "kept": kept}
            found = run_backward(dy, site.x, k, weights, wanted=wanted, **facts)
        return y, found

    return call
