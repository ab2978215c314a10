"""Contenders: sites with drawn weights, their dense layers, and other ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.arguments import GateArguments, Weights
from acm_compiler.acm.ops import cast_weights
from acm_compiler.acm.reference import prefix_output, run_learners
from acm_compiler.codegen.compare import Errors, relative_errors
from acm_compiler.codegen.gpu.dispatch import Histogram
from acm_compiler.codegen.gpu.gate_plan import Choice, GatePlan
from acm_compiler.codegen.gpu.gate_spec import Cut
from acm_compiler.codegen.gpu.launch import Plan, SortedPlan, plan_of
from acm_compiler.codegen.gpu.spec import spec_of
from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.codegen.gpu.tiles import Tiles, bucket_of
from benchmarks.first_gpu_run.device import Calls, Device

HEADS = 12


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One site: kind of learners, tokens, sizes; gate: the width of its gate, as a plan chooses it."""

    name: str
    form: str
    tokens: int
    d_in: int
    width: int
    d_out: int
    learners: int = 4
    gate: int = 64

    @property
    def sizes(self) -> list[str | int]:
        """Form, D, H, O, N: with the number of tokens, all that a plan looks for."""
        return [self.form, self.d_in, self.width, self.d_out, self.learners]


MLPS = {
    "ViT-B": Shape(name="ViT-B MLP", form="mlp", tokens=128 * 197, d_in=768, width=768, d_out=768),
    "XLS-R": Shape(name="XLS-R MLP", form="mlp", tokens=16 * 499, d_in=1024, width=1024, d_out=1024),
    "Llama-8B": Shape(name="Llama-8B MLP", form="gated", tokens=8192, d_in=4096, width=3584, d_out=4096, gate=432),
}
VIT = MLPS["ViT-B"]
PROJECTIONS = (
    replace(VIT, name="ViT-B projection (SVD)", form="linear", width=96),
    replace(VIT, name="ViT-B projection (rows)", form="rows", width=192),
    replace(VIT, name="ViT-B projection (columns)", form="cols", width=192),
    replace(VIT, name="ViT-B q, k and v packed (rows)", form="rows", width=576, d_out=2304),
)


def tiny(shape: Shape) -> Shape:
    """The same kind of site, small enough for Triton's interpreter; few tokens stay few."""
    return replace(shape, tokens=min(shape.tokens, 70), d_in=96, width=24, d_out=96)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site's tensors and the machine that runs it."""

    shape: Shape
    x: Tensor
    weights: Weights
    gate: GateArguments
    machine: Machine


def site_of(shape: Shape, device: Device) -> Site:
    """Drawn in bf16; zeros would run faster than what users have. In a dry run `tiny`."""
    shape = shape if device.is_cuda else tiny(shape)
    n, h, d, o = shape.learners, shape.width, shape.d_in, shape.d_out

    def draw(*size: int) -> Tensor:
        return (torch.randn(*size, device=device.kind) * size[-1] ** -0.5).bfloat16()

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
    x = torch.randn(shape.tokens, d, device=device.kind).bfloat16()
    return Site(
        shape=shape,
        x=x,
        weights=Weights(**absent | given, b_out=draw(n + 1, o), act=act, form=shape.form),
        gate=gate_of(shape, x),
        machine=device.machine,
    )


def gate_of(shape: Shape, x: Tensor) -> GateArguments:
    """The call of a site's gate, with drawn weights."""
    sizes = ((shape.gate, x.shape[1]), (shape.gate,), (shape.learners + 1, shape.gate), (shape.learners + 1,))
    weights = (torch.randn(size, device=x.device).mul(size[-1] ** -0.5).bfloat16() for size in sizes)
    bounds = (torch.tensor(k, dtype=torch.int32, device=x.device) for k in (0, shape.learners))
    return GateArguments(x, *weights, torch.tensor(0.0, device=x.device), *bounds)


def draw_k(site: Site, fraction: float) -> Tensor:
    """k of every token with mean N * fraction: weights exp(m k), m by bisection; one k at 0 and 1 and of one token."""
    n, tokens, device = site.shape.learners, site.shape.tokens, site.x.device
    if fraction in (0.0, 1.0) or tokens == 1:
        return torch.full((tokens,), round(fraction * n), dtype=torch.int32, device=device)
    k = torch.arange(n + 1, dtype=torch.float64)
    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        p = torch.softmax(middle * (k - n / 2), 0)
        low, high = (middle, high) if (p * k).sum() < n * fraction else (low, middle)
    drawn = torch.multinomial(p, tokens, replacement=True, generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.int32).to(device)


def gated_call(site: Site, k: Tensor) -> Callable[[], Tensor]:
    """Gate and learners; the gate's choice is replaced by k, and its histogram by that of k."""
    gate, learners = gate_call(site), learners_plan(site)
    histogram = _histogram_of(k, gate().histogram)

    def call() -> Tensor:
        gate()
        return learners(site.x, k, None, learners.order(k, histogram, site.x))

    return call


def gate_call(site: Site, cut: Cut | None = None) -> Callable[[], Choice]:
    """The gate alone, by a plan that is kept; with another cut of its first product than the table's, if given."""
    plan = GatePlan(site.gate, cost=1.0, k_min=0, rule="logits", machine=site.machine, cut=cut)
    return lambda: plan(site.x, *site.gate[5:])


def _histogram_of(k: Tensor, like: Histogram | None) -> Histogram | None:
    """The histogram of another k in the same blocks, nothing where the gate writes none."""
    if like is None:
        return None
    blocks = -(-len(k) // like.tokens)
    slots = like.counts.numel() // blocks
    place = torch.arange(len(k), device=k.device) // like.tokens * slots + k
    return like._replace(counts=torch.bincount(place, minlength=blocks * slots).to(torch.int32))


def learners_plan(site: Site) -> Plan:
    """The plan of the learners alone."""
    return plan_of(spec_of(site.x, site.weights, None), site.weights, site.machine, len(site.x))


def learners_call(site: Site, k: Tensor, tiles: Tiles | None = None) -> Callable[[], Tensor]:
    """The learners alone, by a plan that is kept; with other tiles than the table's, if given, sorted."""
    plan: Plan = learners_plan(site)
    if tiles is not None:
        spec, bucket = spec_of(site.x, site.weights, None), bucket_of(len(site.x))
        plan = SortedPlan(spec, site.weights, machine=site.machine, tiles=tiles, bucket=bucket)
    return lambda: plan(site.x, k, None)


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
    """The dense site as Inductor tunes it; compiled anew for every site. A dry run only traces it."""
    torch._dynamo.reset()
    if not site.x.is_cuda:
        return torch.compile(dense_call(site), backend="eager")
    return torch.compile(dense_call(site), mode="max-autotune-no-cudagraphs")


def one_k_call(site: Site, fraction: float, run: Callable[..., Tensor] = prefix_output) -> Calls:
    """All tokens at k = N * fraction, where that is a whole number: dense products, no gate; run: perhaps compiled."""
    k = fraction * site.shape.learners
    name = "ours, one k" if run is prefix_output else "ours, one k, compiled"
    return {name: lambda: run(site.x, site.weights, int(k))} if k.is_integer() else {}


def same_macs(site: Site, fraction: float) -> Calls:
    """The dense site cut to a share of its features; nothing where it is none of it or all."""
    full = site.shape.learners * site.shape.width if site.weights.w_out is not None else site.shape.d_out
    full = site.shape.d_out if site.shape.form == "linear" else full
    return {"dense, same MACs": dense_call(site, round(fraction * full))} if 0 < fraction < 1 else {}


def contenders(site: Site, fraction: float, k: Tensor) -> Calls:
    """Everybody but Inductor at one k/N; the first is the base of the ratios."""
    calls: Calls = {"dense, eager": dense_call(site), **same_macs(site, fraction)}
    if fraction > 0 and site.weights.w_out is not None:
        calls["grouped_mm"] = grouped_call(site, k)
    calls["ours"] = gated_call(site, k)
    calls["ours, no gate"] = learners_call(site, k)
    return calls | one_k_call(site, fraction)


def exact_answer(site: Site, k: Tensor) -> Tensor:
    """The ACM's output in float64, by the reference, where the site is."""
    return run_learners(site.x.double(), k, cast_weights(site.weights, torch.float64))


def errors_of(calls: Calls, exact: Tensor) -> dict[str, Errors]:
    """Errors of everybody who computes the ACM."""
    ours = ("grouped_mm", "ours", "ours, no gate")
    return {name: relative_errors(calls[name](), exact) for name in ours if name in calls}
