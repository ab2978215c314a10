"""Contenders of the GPU benchmark: sites with drawn weights, their dense layers, and other ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.arguments import GateArguments, GateWeights
from acm_compiler.acm.ops import cast_weights
from acm_compiler.acm.reference import Weights, run_learners
from acm_compiler.codegen.compare import relative_error
from acm_compiler.codegen.gpu import current_machine
from acm_compiler.codegen.gpu.gate_kernel import run_gate
from acm_compiler.codegen.gpu.launch import run
from acm_compiler.codegen.gpu.stages import Machine

Calls = dict[str, Callable[[], Tensor]]
GATE_WIDTH = 64
HEADS = 12


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One site: kind of learners, tokens, sizes."""

    name: str
    form: str
    tokens: int
    d_in: int
    width: int
    d_out: int
    learners: int = 4


VIT = Shape(name="ViT-B MLP, 128 images", form="mlp", tokens=128 * 197, d_in=768, width=768, d_out=768)
SHAPES = (
    VIT,
    replace(VIT, name="ViT-B MLP, 256 images", tokens=256 * 197),
    replace(VIT, name="ViT-B MLP, 8 images", tokens=8 * 197),
    replace(VIT, name="ViT-B MLP, 1 image", tokens=197),
    Shape(name="XLS-R MLP, 16 x 10 s", form="mlp", tokens=16 * 499, d_in=1024, width=1024, d_out=1024),
    Shape(name="ViT-B projection (SVD)", form="linear", tokens=128 * 197, d_in=768, width=96, d_out=768),
    Shape(name="ViT-B projection (rows)", form="rows", tokens=128 * 197, d_in=768, width=192, d_out=768),
    Shape(name="ViT-B projection (columns)", form="cols", tokens=128 * 197, d_in=768, width=192, d_out=768),
    Shape(name="SwiGLU 4096, 8192 tokens", form="gated", tokens=8192, d_in=4096, width=3584, d_out=4096),
)
SMALL = Shape(name="small", form="mlp", tokens=150, d_in=64, width=32, d_out=64)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site's tensors and the machine that runs it."""

    shape: Shape
    x: Tensor
    weights: Weights
    gate: GateArguments
    machine: Machine


def site_of(shape: Shape, device: str) -> Site:
    """Drawn in bf16; zeros would run faster than what users have."""
    n, h, d, o = shape.learners, shape.width, shape.d_in, shape.d_out

    def draw(*size: int) -> Tensor:
        return (torch.randn(*size, device=device) * size[-1] ** -0.5).bfloat16()

    absent: dict[str, Any] = dict.fromkeys(("b_in", "w_up", "b_up", "w_out", "w_top"))
    part = (HEADS, h // HEADS)
    if shape.form in ("rows", "cols"):
        given: dict[str, Any] = {"w_in": draw(n, *part, d) if shape.form == "rows" else draw(n, o, *part)}
    else:
        given = {"w_in": draw(n, h, d), "w_out": draw(o, n, h)}
    if shape.form == "mlp":
        given["b_in"] = draw(n, h)
    if shape.form == "gated":
        given["w_up"] = draw(n, h, d)
    act = {"mlp": "gelu", "gated": "silu"}.get(shape.form, "identity")
    x, knob = torch.randn(shape.tokens, d, device=device).bfloat16(), torch.tensor(0.0, device=device)
    bounds = (torch.tensor(k, dtype=torch.int32, device=device) for k in (0, n))
    gate = GateWeights(draw(GATE_WIDTH, d), draw(GATE_WIDTH), draw(n + 1, GATE_WIDTH), draw(n + 1))
    return Site(
        shape=shape,
        x=x,
        weights=Weights(**absent | given, b_out=draw(n + 1, o), act=act, form=shape.form),
        gate=GateArguments(x, *gate, knob, *bounds),
        machine=current_machine() if device == "cuda" else Machine(arch=90, processors=3),
    )


def draw_k(site: Site, fraction: float) -> Tensor:
    """k of every token with mean N * fraction: weights exp(m k), m by bisection; constant at 0 and 1."""
    n, tokens, device = site.shape.learners, site.shape.tokens, site.x.device
    if fraction in (0.0, 1.0):
        return torch.full((tokens,), round(fraction * n), dtype=torch.int32, device=device)
    k = torch.arange(n + 1, dtype=torch.float64)
    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        p = torch.softmax(middle * (k - n / 2), 0)
        low, high = (middle, high) if (p * k).sum() < n * fraction else (low, middle)
    drawn = torch.multinomial(p, tokens, replacement=True, generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.int32).to(device)


def gated_call(site: Site, k: Tensor) -> Tensor:
    """Gate and learners; the gate's choice is replaced by k."""
    run_gate(site.gate, cost=1.0, k_min=0, rule="logits", machine=site.machine)
    return run(site.x, k, site.weights, machine=site.machine)


def dense_call(site: Site, hidden: int | None = None) -> Callable[[], Tensor]:
    """The site before its conversion, or its first `hidden` features."""
    w, x = site.weights, site.x
    if w.w_out is None or w.form == "linear":
        matrix = torch.randn(site.shape.d_out, site.shape.d_in, device=x.device).bfloat16()
        matrix = matrix[:hidden].contiguous()
        return lambda: F.linear(x, matrix)
    w1, w2 = w.w_in.flatten(0, 1)[:hidden].contiguous(), w.w_out.flatten(1)[:, :hidden].contiguous()
    bias = None if w.b_in is None else w.b_in.flatten()[:hidden].contiguous()
    if w.w_up is None:
        return lambda: F.linear(F.gelu(F.linear(x, w1, bias)), w2)
    up = w.w_up.flatten(0, 1)[:hidden].contiguous()
    return lambda: F.linear(F.silu(F.linear(x, w1)) * F.linear(x, up), w2)


def grouped_call(site: Site, k: Tensor) -> Callable[[], Tensor]:
    """One grouped product per layer, a group per learner, rows gathered before and added up after."""
    w, x = site.weights, site.x
    assert w.w_out is not None
    rows = [torch.nonzero(k > n).flatten() for n in range(site.shape.learners)]
    index = torch.cat(rows)
    counts = torch.tensor([row.numel() for row in rows])
    offsets = counts.cumsum(0).to(torch.int32).to(x.device)
    w1 = w.w_in.transpose(1, 2)
    w2 = w.w_out.permute(1, 2, 0).contiguous()
    bias = None if w.b_in is None else w.b_in.repeat_interleave(counts.to(x.device), 0)
    b_out = w.b_out[k.long()]
    act = {"gelu": F.gelu, "silu": F.silu, "identity": lambda h: h}[w.act]

    def call() -> Tensor:
        taken = x[index]
        h = torch._grouped_mm(taken, w1, offs=offsets)
        h = act(h if bias is None else h + bias)
        if w.w_up is not None:
            h = h * torch._grouped_mm(taken, w.w_up.transpose(1, 2), offs=offsets)
        return b_out.index_add(0, index, torch._grouped_mm(h, w2, offs=offsets))

    return call


def compiled_dense(site: Site) -> Callable[[], Tensor]:
    """The dense site as Inductor tunes it; compiled anew for every site."""
    torch._dynamo.reset()
    return torch.compile(dense_call(site), mode="max-autotune-no-cudagraphs")


def contenders(site: Site, fraction: float, k: Tensor) -> Calls:
    """Everybody but Inductor at one k/N; the first is the base of the ratios."""
    calls: Calls = {"dense, eager": dense_call(site)}
    if 0 < fraction < 1:
        full = site.shape.learners * site.shape.width if site.weights.w_out is not None else site.shape.d_out
        full = site.shape.d_out if site.shape.form == "linear" else full
        calls["dense, same MACs"] = dense_call(site, round(fraction * full))
    if fraction > 0 and site.weights.w_out is not None:
        calls["grouped_mm"] = grouped_call(site, k)
    calls["ours"] = lambda: gated_call(site, k)
    calls["ours, no gate"] = lambda: run(site.x, k, site.weights, machine=site.machine)
    return calls


def errors_of(site: Site, k: Tensor, calls: Calls) -> dict[str, float]:
    """Relative error of everybody who computes the ACM, on up to 512 tokens against float64."""
    rows = torch.randperm(site.shape.tokens)[:512]
    some = rows.to(site.x.device)
    exact = cast_weights(Weights(**{f: _cpu(getattr(site.weights, f)) for f in Weights.__slots__}), torch.float64)
    expected = run_learners(site.x[some].cpu().double(), k[some].cpu(), exact)
    ours = ("grouped_mm", "ours", "ours, no gate")
    return {name: relative_error(calls[name]()[some].cpu(), expected) for name in ours if name in calls}


def _cpu(value: Any) -> Any:
    return value.cpu() if torch.is_tensor(value) else value
