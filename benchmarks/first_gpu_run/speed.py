"""Times of sites, as ratios within one run: to the dense layers, over k, of few tokens, of tiles, of single kernels.

Contenders run in turn; k is drawn once per mean; the gate runs and its choice is replaced, except in "ours, no gate".
"grouped_mm" is told the counts beforehand, which flatters it. "dense, same MACs" is the dense MLP cut to k/N. "D2DMoE"
has so many experts, each of so many hidden columns (`d2dmoe`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.reference import prefix_output
from acm_compiler.codegen.compare import relative_errors
from acm_compiler.codegen.gpu.gate_spec import Cut
from acm_compiler.codegen.gpu.spec import spec_of
from acm_compiler.codegen.gpu.tiles import Tiles, choose_tiles, tile_of
from benchmarks.first_gpu_run.contenders import (
    MLPS,
    PROJECTIONS,
    VIT,
    Shape,
    Site,
    compiled_dense,
    contenders,
    dense_call,
    draw_k,
    exact_answer,
    gate_call,
    gate_of,
    gated_call,
    learners_call,
    one_k_call,
    same_macs,
    site_of,
)
from benchmarks.first_gpu_run.d2dmoe import FIRST, PUBLISHED, SECOND, Experts
from benchmarks.first_gpu_run.device import Calls, Device, race
from benchmarks.first_gpu_run.parts import Row

FRACTIONS = (0.5, 1.0, 0.25, 0.75, 0.0)
PREFILL, FEW = (8192, 2048, 4096, 1024, 512, 256), (1, 4, 16, 64)
CANDIDATES = (
    "128x128x64 w4 s3 r2",
    "128x128x64 w4 s3 r2 flat",
    "128x128x64 w8 s3 r2",
    "128x256x64 w8 s2 r1",
    "128x256x32 w8 s4 r1",
    "128x128x32 w4 s4 r2",
    "64x64x64 w4 s3 r4",
    "64x128x64 w4 s4 r2 flat",
    "64x256x64 w4 s3 r1",
)
GATE_CUTS = (
    ("1x4x512 w2 s1 r1", 2048),  # the table's
    ("1x4x512 w2 s1 r1", 1024),
    ("1x4x512 w2 s1 r1", 512),
    ("1x2x512 w2 s1 r1", 2048),
    ("1x2x512 w2 s1 r1", 1024),
    ("1x4x256 w1 s1 r1", 1024),
    ("1x8x256 w2 s1 r1", 512),
    ("1x8x512 w4 s1 r1", 1024),
)
"""Tiles and spans of features of the first product of a large gate, for one token."""
UNGATED = replace(MLPS["Llama-8B"], name="Llama-8B MLP, one branch", form="mlp")
WITH_EXPERTS = MLPS["ViT-B"], MLPS["XLS-R"], UNGATED
TILED = (VIT, MLPS["Llama-8B"], PROJECTIONS[0], replace(VIT, tokens=8 * 197))


def ceilings(device: Device) -> Iterator[Row]:
    """Large and site-sized products, and a copy."""
    shapes = {"large": (8192, 8192, 8192)}
    for name, shape in MLPS.items():
        shapes |= {f"{name} layer 1": (shape.tokens, shape.d_in, 4 * shape.width)}
        shapes |= {f"{name} layer 2": (shape.tokens, 4 * shape.width, shape.d_out)}
    for name, (m, k, n) in shapes.items():
        m, k, n = (m, k, n) if device.is_cuda else (64, 96, 80)
        a, b = (torch.randn(*s, device=device.kind).bfloat16() for s in ((m, k), (n, k)))
        row = race({name: lambda a=a, b=b: F.linear(a, b)}, device.rounds, device)[0]
        yield {"product": name, "m k n": f"{m} {k} {n}", "us": row["us"], "tflops": 2e-6 * m * k * n / row["us"]}
    big = torch.empty(1 << (29 if device.is_cuda else 12), dtype=torch.int8, device=device.kind)
    row = race({"copy": big.clone}, device.rounds, device)[0]
    yield {"product": "copy", "m k n": f"{big.numel()}", "us": row["us"], "gb_s": 2e-3 * big.numel() / row["us"]}


def build(device: Device) -> Iterator[Row]:
    """Kernels of the parts that follow, built by several processes at once: later ones find them in Triton's cache."""
    shapes = [replace(own, tokens=tokens) for tokens in (8192, 1024, 64, 1) for own in MLPS.values()]
    jobs: list[tuple[Shape, Tiles | None]] = [(shape, None) for shape in (*shapes, *PROJECTIONS)]
    jobs += [(shape, pair) for pair in _pairs() for shape in TILED]
    for shape, pair in device.mine(device.some(jobs)):
        site = site_of(shape, device)
        k = draw_k(site, 0.5)
        if pair is None:
            gated_call(site, k)()
        else:
            learners_call(site, k, pair)()
        device.wait()
        yield {"site": shape.name, "tokens": site.shape.tokens, "tiles": "" if pair is None else _named(pair)}


def ratios(device: Device, name: str) -> Iterator[Row]:
    """One MLP at its own number of tokens and others, every k/N; Inductor tunes the dense one for its own alone."""
    own = MLPS[name]
    for tokens in device.some(dict.fromkeys((own.tokens, *PREFILL))):
        yield from _ratios(device, replace(own, tokens=tokens), tuned=tokens == own.tokens)


def more(device: Device) -> Iterator[Row]:
    """Projections, one image, many images."""
    images = (replace(VIT, tokens=n * 197) for n in (1, 8, 256))
    for shape in device.some((*PROJECTIONS, *images)):
        yield from _ratios(device, shape, tuned=False)


def decode(device: Device) -> Iterator[Row]:
    """Few tokens, every k/N."""
    for name in ("Llama-8B", "ViT-B", "XLS-R"):
        for tokens in device.some(FEW):
            yield from _ratios(device, replace(MLPS[name], tokens=tokens), tuned=False)
    yield from gate_cuts(device)


def gate_cuts(device: Device) -> Iterator[Row]:
    """The gate of one token of a Llama-8B, with its first product cut in every way; whole size in a dry run, too."""
    shape = replace(MLPS["Llama-8B"], tokens=1)
    x = torch.randn(1, shape.d_in, device=device.kind).bfloat16()
    site = replace(site_of(shape, device), x=x, gate=gate_of(shape, x))
    cuts = device.some(GATE_CUTS)
    calls: Calls = {
        f"gate, {text}, spans of {span}": gate_call(site, Cut(tile=tile_of(text), bulk=False, span=span))
        for text, span in cuts
    }
    for row in race(calls, device.rounds, device):
        yield {"site": shape.name, "tokens": 1, **row}


def _ratios(device: Device, shape: Shape, *, tuned: bool) -> Iterator[Row]:
    site = site_of(shape, device)
    extra: Calls = {"dense, Inductor max-autotune": compiled_dense(site)} if tuned else {}
    prefix = torch.compile(prefix_output, backend="inductor" if device.is_cuda else "eager")
    for fraction in device.some(FRACTIONS):
        calls = contenders(site, fraction, draw_k(site, fraction)) | extra
        if tuned:
            calls |= one_k_call(site, fraction, prefix)
        facts = {"site": shape.name, "shape": site.shape.sizes, "tokens": site.shape.tokens, "k/N": fraction}
        yield from [{**facts, **row} for row in race(calls, device.rounds, device)]


def line(device: Device) -> Iterator[Row]:
    """Time over the mean k/N of mixed tokens: a straight line's slope, intercept and R2; times over the dense one's."""
    for tokens in device.some((None, *PREFILL, *FEW)):
        for own in MLPS.values():
            shape = replace(own, tokens=tokens or own.tokens)
            if tokens == own.tokens:
                continue
            site = site_of(shape, device)
            steps = 2 if not device.is_cuda else 20 if tokens is None else 8
            drawn = [draw_k(site, step / steps) for step in range(1, steps + 1)]
            calls: Calls = {"dense, eager": dense_call(site)}
            calls |= {f"{at}": gated_call(site, k) for at, k in enumerate(drawn)}
            rows = race(calls, device.rounds, device)
            ratio = {row["contender"]: row.get("ratio", torch.nan) for row in rows}
            x = torch.stack([k.double().mean() for k in drawn]).cpu() / shape.learners
            y = torch.tensor([ratio[str(at)] for at in range(steps)], dtype=torch.float64)
            yield {"site": shape.name, "tokens": site.shape.tokens, "dense_us": rows[0]["us"], **straight_line(x, y)}


def straight_line(x: Tensor, y: Tensor) -> dict[str, float]:
    """Slope, intercept, R2 and largest residual of the line of least squares through y over x; float64."""
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    rest = y - (y.mean() + slope * (x - x.mean()))
    fit = {"slope": slope, "intercept": float(y.mean() - slope * x.mean())}
    return fit | {"r2": float(1 - (rest**2).sum() / ((y - y.mean()) ** 2).sum()), "worst": float(rest.abs().max())}


def tiles(device: Device) -> Iterator[Row]:
    """Candidates of both layers with the same rows, at k/N 0.5; to set the tile table from."""
    for shape in device.some(TILED):
        site = site_of(shape, device)
        k = draw_k(site, 0.5)
        base = learners_call(
            site, k, choose_tiles(spec_of(site.x, site.weights, None), site.machine.arch, shape.tokens)
        )
        for pair in device.some(_pairs()):
            calls: Calls = {"table": base, _named(pair): learners_call(site, k, pair)}
            rows = race(calls, max(2, device.rounds // 3), device)
            yield {"site": shape.name, "tokens": site.shape.tokens, **rows[-1]}


def _pairs() -> list[Tiles]:
    """Candidates for both layers that agree."""
    known = [tile_of(text) for text in CANDIDATES]
    pairs = [(one, two) for one in known for two in known if one.m == two.m and one.n % two.k == 0]
    return [Tiles(layer1=one, layer2=two, provenance="candidate") for one, two in pairs]


def _named(pair: Tiles) -> str:
    return f"{pair.layer1} | {pair.layer2}"


def build_experts(device: Device) -> Iterator[Row]:
    """The kernels of `experts`, by several processes at once."""
    pairs = device.some(zip(FIRST, SECOND, strict=True))
    for shape, (first, second) in device.mine(product(device.some(WITH_EXPERTS), pairs)):
        site = site_of(replace(shape, tokens=256), device)
        tiles = {"first": tile_of(first), "second": tile_of(second)}
        for width, atomic in product(_widths(site), (True, False)):
            Experts(site=site, width=width, atomic=atomic, **tiles)(draw_k(site, 0.5))
            device.wait()
        yield {"site": site.shape.name, "tiles": f"{first} | {second}"}


def experts(device: Device) -> Iterator[Row]:
    """D2DMoE's fastest tiles at k/N 0.5, then everybody's times at every k/N and how far its outputs are off."""
    for shape in device.some(WITH_EXPERTS):
        site = site_of(shape, device)
        facts = {"site": site.shape.name, "tokens": site.shape.tokens}
        found: list[Experts] = []
        for width in _widths(site):
            tuned, rows = _tuned(site, width, device)
            found += [tuned, replace(tuned, atomic=False)]
            yield from [{**facts, "k/N": 0.5, **row} for row in rows]
        for fraction in device.some(FRACTIONS[:-1]):
            k = draw_k(site, fraction)
            theirs = {str(own): own.with_router(k) for own in found}
            exact = exact_answer(site, k)
            off = {name: max(relative_errors(call(), exact)) for name, call in theirs.items()}
            calls: Calls = {"dense, eager": dense_call(site), **same_macs(site, fraction)}
            calls |= {"ours": gated_call(site, k), "ours, no gate": learners_call(site, k), **theirs}
            for row in race(calls, device.rounds, device):
                yield {**facts, "k/N": fraction, **row, "error": off.get(row["contender"], "")}


def _widths(site: Site) -> tuple[int, int]:
    """Hidden columns of an expert: those of a learner, and as published, or in a dry run half a learner's."""
    return site.shape.width, PUBLISHED if site.shape.width % PUBLISHED == 0 else site.shape.width // 2


def _tuned(site: Site, width: int, device: Device) -> tuple[Experts, list[Row]]:
    """Experts with the fastest candidates for both layers, and the times of all."""
    k, rows = draw_k(site, 0.5), []
    best = Experts(site=site, width=width, atomic=True, first=tile_of(FIRST[0]), second=tile_of(SECOND[0]))
    lists = best.lists(k)
    for layer, candidates in (("first", FIRST), ("second", SECOND)):
        h = best.hidden(lists)
        tried = {text: replace(best, **{layer: tile_of(text)}) for text in device.some(candidates)}
        calls: Calls = {
            text: partial(own.hidden, lists) if layer == "first" else partial(own.outputs, h, k, lists)
            for text, own in tried.items()
        }
        times = [row for row in race(calls, max(2, device.rounds // 3), device) if "us" in row]
        best = tried[min(times, key=lambda row: row["us"])["contender"]]
        rows += [row | {"contender": f"{best}, {layer} layer: {row['contender']}"} for row in times]
    return best, rows


def kernels(device: Device) -> Iterator[Row]:
    """Each kernel's own time, of calls of ours and of the dense layers, as torch's profiler sees it."""
    shapes = [(own, fraction) for own in MLPS.values() for fraction in (1.0, 0.5)]
    few = [(replace(MLPS[name], tokens=tokens), 0.5) for name in ("ViT-B", "Llama-8B") for tokens in (1, 64)]
    for shape, fraction in device.some([*shapes, *few]):
        site = site_of(shape, device)
        k = draw_k(site, fraction)
        for name, call in {"ours": gated_call(site, k), "dense, eager": dense_call(site)}.items():
            facts = {"site": shape.name, "tokens": site.shape.tokens, "k/N": fraction, "contender": name}
            yield from [{**facts, **row} for row in device.profiled(call)]
