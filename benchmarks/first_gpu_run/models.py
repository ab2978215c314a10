"""Whole models with drawn weights: host time per ACM, eager and compiled times, a training step, a calibration."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.acm import ACM
from acm_compiler.evaluation.bench import interleave
from benchmarks.first_gpu_run.device import Device
from benchmarks.first_gpu_run.parts import Row
from tests.helpers.rewrite_cases import give_budgets

N, LAYERS = 4, 4
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY_LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
VIT = {"image_size": 224, "patch_size": 16, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072}
TINY_VIT = {"image_size": 32, "patch_size": 8, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
VOCABULARY = 2000
CALIBRATED_LAYERS = 1
MODELS = {"ViT-B": (128, 1), "Llama-8B, 4 layers": (1, 2048)}  # batches: images, tokens
MODES = ("reduce-overhead", "compiled", "eager")
KS = (None, 2, 1, 4)
MOST_KERNELS = 15  # that are named
Inputs = tuple[Any, ...]


def host(device: Device) -> Iterator[Row]:
    """Microseconds of the host per ACM and per dense MLP: calls of few tokens that are only started, not waited for."""
    dense, converted, (x,) = vit_of(device, batch=1, layers=2)
    site = next(s for s in acm.sites(converted).values() if s.learners.form == "mlp")
    tokens = torch.randn(64, site.d_in, device=device.kind, dtype=x.dtype)
    mlp = nn.Sequential(nn.Linear(site.d_in, 4 * site.d_in), nn.GELU(), nn.Linear(4 * site.d_in, site.d_in))
    calls: dict[str, Any] = {"dense MLP": mlp.to(tokens), "ACM": site}
    whole: dict[str, Any] = {"dense model": dense, "converted model": converted}
    whole |= {f"{name}, compiled": model for name, model in compiled(dense, converted).items()}
    with torch.no_grad():
        for name, call in calls.items():
            yield {"call": name, "host_us": started_us(lambda call=call: call(tokens), device)}
        for k in (None, 2):
            acm.set_k(converted, k)
            for name, call in whole.items():
                spent = started_us(lambda call=call: call(x), device)
                facts = {"call": name, "k": "gates" if k is None else k}
                yield {**facts, "host_us": spent, "per site_us": spent / len(acm.sites(converted))}


def started_us(call: Callable[[], object], device: Device) -> float:
    """Median microseconds until a call returns, of an idle device."""
    for _ in range(3):
        call()
    spent = []
    for _ in range(device.rounds):
        device.wait()
        start = time.perf_counter()
        call()
        spent.append(1e6 * (time.perf_counter() - start))
    return float(torch.tensor(spent).median())


def build(device: Device) -> Iterator[Row]:
    """Each model compiled in each mode by a process of its own: those that time them find it in Inductor's cache."""
    cases = [(name, batch) for name, batches in MODELS.items() for batch in batches]
    for (name, batch), mode, kind in device.mine(product(device.some(cases), MODES[:2], ("ACM", "dense"))):
        start = time.perf_counter()
        dense, converted, inputs = made(name, device, batch)
        model = compiled(dense, converted, mode)[kind]
        for k in KS if kind == "ACM" else KS[:1]:
            acm.set_k(converted, k)
            with torch.no_grad():
                model(*inputs)
        device.wait()
        facts = {"model": name, "batch or tokens": batch, "mode": mode, "contender": kind}
        yield {**facts, "seconds": time.perf_counter() - start}


def whole(device: Device, name: str) -> Iterator[Row]:
    """A model's forward by CUDA graphs, compiled, and in eager mode, with free gates and at every k; kernels of one."""
    for batch in MODELS[name][: None if device.is_cuda else 1]:
        dense, converted, inputs = made(name, device, batch)
        acm.set_k(converted, None)
        with torch.no_grad(), acm.record(converted) as usage:
            converted(*inputs)
        for mode in MODES:
            pair = {"dense": dense, "ACM": converted} if mode == "eager" else compiled(dense, converted, mode)
            models = {f"{kind}, {mode}": model for kind, model in pair.items()}
            for k in KS:
                acm.set_k(converted, k)
                facts = {"model": name, "batch or tokens": batch, "k": k or f"gates, {usage.budget:.2f}"}
                yield from [{**facts, **row} for row in timed(models, inputs, device)]
                for kind, model in models.items() if (mode, k) == (MODES[0], KS[0]) else ():
                    yield from [{**facts, "contender": kind, **row} for row in kernels_of(model, inputs, device)]


def compiled(dense: nn.Module, converted: nn.Module, mode: str = "compiled") -> dict[str, Any]:
    """Both, as `torch.compile` makes them in that mode of Inductor's, or in its default."""
    torch._dynamo.reset()
    given = None if mode == "compiled" else mode
    return {"dense": torch.compile(dense, mode=given), "ACM": torch.compile(converted, backend="acm", mode=given)}


def timed(models: dict[str, Any], inputs: Inputs, device: Device) -> list[Row]:
    """Milliseconds of each, and the ratio to the first, which runs before and after it."""
    with torch.no_grad():
        calls = {name: lambda model=model: model(*inputs) for name, model in models.items()}
        found = interleave(calls, base=next(iter(calls)), rounds=min(device.rounds, 11), device=device.kind)
    return [{"contender": name, "ms": timing.time_ms, "ratio": timing.ratio} for name, timing in found.items()]


def kernels_of(model: Any, inputs: Inputs, device: Device) -> list[Row]:
    """The longest kernels of a forward, and all together."""
    with torch.no_grad():
        rows = device.profiled(lambda: model(*inputs))
    every = {"kernel": "all", "calls": sum(row["calls"] for row in rows), "us": sum(row["us"] for row in rows)}
    return [every, *rows[:MOST_KERNELS]]


def training(device: Device) -> Iterator[Row]:
    """Forward and backward of all of ViT-B: gates frozen, every token at one k; gates relaxed; peak memory."""
    dense, converted, inputs = vit_of(device, batch=64 if device.is_cuda else 2)
    for model in (dense, converted):
        model.train()
    contenders: dict[str, Callable[[], object]] = {"dense": lambda: step(dense, inputs)}
    contenders["ACM"] = lambda: step(converted, inputs)
    for k in (2, 4, 1, None, "relaxed"):
        acm.set_k(converted, None if k == "relaxed" else k)
        for site in acm.sites(converted).values():
            site.temperature = 0.8 if k == "relaxed" else None
            site.gate.requires_grad_(k == "relaxed")
        found = interleave(contenders, base="dense", rounds=min(device.rounds, 7), device=device.kind)
        for name, call in contenders.items():
            device.peak_bytes()
            call()
            device.wait()
            facts = {"k": "gates" if k is None else k, "contender": name, "peak_gb": device.peak_bytes() / 1e9}
            yield {**facts, "ms": found[name].time_ms, "ratio": found[name].ratio}


def step(model: nn.Module, inputs: Inputs) -> None:
    """One forward and backward."""
    for parameter in model.parameters():
        parameter.grad = None
    output = model(*inputs)
    output.float().square().mean().backward()
    for site in (module for module in model.modules() if isinstance(module, ACM)):
        site.choices.clear()


def calibration(device: Device) -> Iterator[Row]:
    """`acm.calibrate` of a layer of Llama-8B's shape: seconds and memory, with few tokens and with many."""
    for tokens in (4096, 20_000):
        dense, converted, _ = llama_of(device, batch=1, layers=CALIBRATED_LAYERS)
        del dense
        length = 512 if device.is_cuda else 16
        batches = [drawn_text(device, length) for _ in range(2 * tokens // length if device.is_cuda else 12)]
        device.peak_bytes()
        start = time.perf_counter()
        acm.calibrate(converted, batches, tokens=tokens if device.is_cuda else 100, progress=print)
        device.wait()
        spent = time.perf_counter() - start
        facts = {"layers": CALIBRATED_LAYERS, "tokens": tokens, "seconds": spent}
        yield {
            **facts,
            "peak_gb": device.peak_bytes() / 1e9,
            "minutes of 32 layers": 32 / CALIBRATED_LAYERS * spent / 60,
        }


def package(device: Device) -> Iterator[Row]:
    """ViT-B as a package that runs without Python, which export compares with the model; in a dry run as a program."""
    _, converted, inputs = vit_of(device, batch=8)
    give_budgets(converted)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        file = acm.export(converted, Path(folder, "out"), inputs, "aoti" if device.is_cuda else "pt2")
        facts = json.loads(file.with_name("export.json").read_text())
        spent = time.perf_counter() - start
    yield {"format": facts["kind"], "seconds": spent, "relative error": facts["relative_error"]}


def made(name: str, device: Device, batch: int) -> tuple[nn.Module, nn.Module, Inputs]:
    """A model of `MODELS`, dense and converted, and its inputs; of two examples in a dry run."""
    make = vit_of if name == "ViT-B" else llama_of
    return make(device, batch=batch if device.is_cuda else 2)


def vit_of(device: Device, *, batch: int, layers: int = 12) -> tuple[nn.Module, nn.Module, Inputs]:
    """ViT-B, dense and converted, and images; weights are drawn."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    sizes, layers = (VIT, layers) if device.is_cuda else (TINY_VIT, 1)
    dense = VisionTransformer(**sizes, num_layers=layers)
    nn.init.normal_(dense.heads.head.weight, std=0.02)  # torchvision starts it at zero
    images = torch.randn(batch, 3, dense.image_size, dense.image_size)
    return placed(dense, images, device)


def llama_of(device: Device, *, batch: int, layers: int = LAYERS) -> tuple[nn.Module, nn.Module, Inputs]:
    """Layers of Llama-8B's shape, their MLPs converted, and a text of `batch` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LLAMA if device.is_cuda else TINY_LLAMA
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=VOCABULARY, use_cache=False)
    return placed(LlamaForCausalLM(config), drawn_text(Device("cpu"), batch), device)


def drawn_text(device: Device, length: int) -> Tensor:
    """One text of drawn tokens."""
    return torch.randint(VOCABULARY, (1, length), device=device.kind)


def placed(dense: nn.Module, inputs: Tensor, device: Device) -> tuple[nn.Module, nn.Module, Inputs]:
    """Both models and the inputs in bf16 where they run; MLPs are converted, gates spread tokens over all k."""
    warnings.simplefilter("ignore")
    dense = dense.eval().to(device.kind, torch.bfloat16)
    inputs = inputs.to(device.kind)
    inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    plan = acm.plan(dense, inputs[:1], learners=N, init="random", sites="mlp")
    converted = acm.rewrite(dense, plan).eval()
    with torch.no_grad():
        for site in acm.sites(converted).values():
            spread(site)
    return dense, converted, (inputs,)


def spread(site: ACM) -> None:
    """Make a drawn gate choose every k for some tokens."""
    site.gate.outer.weight.mul_(30)
