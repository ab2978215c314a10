"""Times on a CUDA device, as ratios within one run; every part ends within ten minutes.

A line of JSON is written for each row as soon as it is there.

    python benchmarks/gpu.py check   [--out check.jsonl]    ceilings; every contender's answers; 20 repeats, bit for bit
    python benchmarks/gpu.py tiles   [--out tiles.jsonl]    tiles of both layers, to fill the tile table from
    python benchmarks/gpu.py ratios  [--out ratios.jsonl]   every shape and k/N against the dense contenders
    python benchmarks/gpu.py line    [--out line.jsonl]     20 mean k, mixed: the linear fit of time over k/N
    python benchmarks/gpu.py parts   [--out parts.jsonl]    gate, dispatch, layer 1, layer 2 each; few tokens

Each contender is one CUDA graph; contenders run in turn, after a write of 256 MB that empties the cache; ratios are
formed within a round. k is drawn once per mean; the gate runs and its choice is replaced, except in "ours, no gate".
"grouped_mm" is told the counts beforehand, which flatters it. "dense, same MACs" is the dense MLP cut to k/N.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
import triton
from gpu_contenders import (
    SHAPES,
    SMALL,
    VIT,
    Calls,
    Shape,
    Site,
    compiled_dense,
    contenders,
    dense_call,
    draw_k,
    errors_of,
    gated_call,
    site_of,
)
from torch import Tensor

from acm_compiler.codegen.compare import TOLERANCE
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.dispatch import sort_by_k
from acm_compiler.codegen.gpu.gate_kernel import run_gate
from acm_compiler.codegen.gpu.launch import Call, run, run_call
from acm_compiler.codegen.gpu.spec import spec_of
from acm_compiler.codegen.gpu.tiles import Tiles, choose_tiles, tile_of

Row = dict[str, Any]
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
SECONDS = 540
CANDIDATES = (
    "128x128x64 w4 s3 r2",
    "128x128x64 w8 s3 r1",
    "128x256x64 w8 s3 r1",
    "128x128x32 w4 s4 r2",
    "64x64x64 w4 s3 r4",
    "64x128x64 w4 s4 r2",
    "64x256x64 w4 s3 r1",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices of the command line."""

    device: str
    rounds: int
    wanted: str

    def shapes(self, among: Sequence[Shape]) -> list[Shape]:
        """Those that were asked for."""
        return [shape for shape in among if self.wanted in shape.name]


def capture(calls: Calls) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """A CUDA graph of each contender, and why some have none."""
    graphs, refused = {}, {}
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            graphs[name] = graph.replay
        except (RuntimeError, NotImplementedError) as error:
            refused[name] = str(error).splitlines()[0]
    return graphs, refused


def race(calls: Calls, rounds: int, *, cold: bool = True) -> list[dict[str, Any]]:
    """Microseconds of everybody, in turn, and their ratios to the first within each round."""
    graphs, refused = capture(calls)
    junk = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 3):
        events = {}
        for name, replay in graphs.items():
            if cold:
                junk.fill_(turn % 2)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            events[name] = start, end
        torch.cuda.synchronize()
        if turn >= 3:
            for name, (start, end) in events.items():
                times[name].append(1000 * start.elapsed_time(end))
    base = next(iter(times.values()))
    rows: list[dict[str, Any]] = [{"contender": name, **_summary(own, base)} for name, own in times.items()]
    return rows + [{"contender": name, "refused": why} for name, why in refused.items()]


def _summary(own: list[float], base: list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(own, n=4)
    ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
    return {"time_us": median, "q1_us": q1, "q3_us": q3, "ratio": ratio}


def check(options: Options) -> Iterator[Row]:
    """Correctness first: answers within tolerance, the same bits every time; then what the device can do."""
    for shape in (SMALL, replace(SMALL, form="gated")) if options.device == "cpu" else options.shapes(SHAPES):
        site = site_of(shape, options.device)
        for fraction in (0.0, 0.5, 1.0):
            k = draw_k(site, fraction)
            calls = contenders(site, fraction, k)
            first = calls["ours"]()
            same = all(torch.equal(calls["ours"](), first) for _ in range(1 if options.device == "cpu" else 20))
            errors = errors_of(site, k, calls)
            fine = same and errors["ours"] <= TOLERANCE[torch.bfloat16]
            yield {"site": shape.name, "k/N": fraction, "errors": errors, "repeatable": same, "fine": fine}
    if options.device == "cuda":
        yield from ceilings(options.rounds)


def ceilings(rounds: int) -> Iterator[Row]:
    """Large and site-sized products and a copy."""
    sizes = {"8192 x 8192 x 8192": (8192, 8192, 8192), "layer 1": (25216, 768, 3072), "layer 2": (25216, 3072, 768)}
    for name, (m, k, n) in sizes.items():
        a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
        row = race({name: lambda a=a, b=b: F.linear(a, b)}, rounds)[0]
        yield {**row, "tflops": 2e-6 * m * k * n / row["time_us"]}
    big = torch.empty(1 << 29, dtype=torch.int8, device="cuda")
    row = race({"copy of 512 MB": big.clone}, rounds)[0]
    yield {**row, "gbytes_per_s": 2 * big.numel() / row["time_us"] / 1000}


def tiles(options: Options) -> Iterator[Row]:
    """Candidates of both layers with the same rows, at k/N 0.5 and 1."""
    known = [tile_of(text) for text in CANDIDATES]
    started = time.monotonic()
    for shape in options.shapes((VIT, SHAPES[2], SHAPES[5], SHAPES[4])):
        site = site_of(shape, options.device)
        spec = spec_of(site.x, site.weights, None)
        for fraction in (0.5, 1.0):
            k = draw_k(site, fraction)
            calls: Calls = {"table": _with_tiles(site, k, choose_tiles(spec, site.machine.arch, shape.tokens))}
            for one in known:
                for two in known:
                    if one.m == two.m and one.n % two.k == 0 and time.monotonic() - started < SECONDS:
                        both = Tiles(layer1=one, layer2=two, provenance="candidate")
                        calls[f"{one} | {two}"] = _with_tiles(site, k, both)
            yield from [
                {"site": shape.name, "k/N": fraction, **row} for row in race(calls, max(10, options.rounds // 3))
            ]


def _with_tiles(site: Site, k: Tensor, both: Tiles) -> Callable[[], Tensor]:
    spec = spec_of(site.x, site.weights, None)

    def call() -> Tensor:
        order = sort_by_k(k, spec.learners)
        whole = Call(spec=spec, machine=site.machine, tiles=both, order=order, x_TD=site.x)
        return run_call(whole, site.weights, None)

    return call


def ratios(options: Options) -> Iterator[Row]:
    """Every shape at every k/N."""
    started = time.monotonic()
    for shape in options.shapes(SHAPES):
        site = site_of(shape, options.device)
        tuned = compiled_dense(site)
        for fraction in FRACTIONS:
            if time.monotonic() - started > SECONDS:
                yield {"site": shape.name, "k/N": fraction, "refused": "out of time"}
                continue
            calls = {**contenders(site, fraction, draw_k(site, fraction)), "dense, Inductor max-autotune": tuned}
            for cold in (True, False):
                facts = {"site": shape.name, "k/N": fraction, "cache": "cold" if cold else "warm"}
                yield from [{**facts, **row} for row in race(calls, options.rounds, cold=cold)]


def line(options: Options) -> Iterator[Row]:
    """Time over the mean k/N of mixed tokens, with slope, intercept and R2 of a straight line."""
    for shape in options.shapes(SHAPES[:2]):
        site = site_of(shape, options.device)
        drawn = {f"{step / 20:.2f}": draw_k(site, step / 20) for step in range(1, 21)}
        calls: Calls = {"dense, eager": dense_call(site)}
        calls |= {name: lambda site=site, k=k: gated_call(site, k) for name, k in drawn.items()}
        timed = {row["contender"]: row for row in race(calls, options.rounds)}
        x = torch.tensor([float(k.double().mean()) / shape.learners for k in drawn.values()], dtype=torch.float64)
        y = torch.tensor([timed[name]["time_us"] for name in drawn], dtype=torch.float64)
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        rest = y - (y.mean() + slope * (x - x.mean()))
        fit = {"slope_us": slope, "intercept_us": float(y.mean() - slope * x.mean())}
        fit |= {"r2": float(1 - (rest**2).sum() / ((y - y.mean()) ** 2).sum()), "worst_us": float(rest.abs().max())}
        yield from [{"site": shape.name, **row} for row in timed.values()] + [{"site": shape.name, "fit": fit}]


def parts(options: Options) -> Iterator[Row]:
    """Times of each kernel of a call, and of calls of few tokens."""
    few = (replace(VIT, name=f"{t} tokens", tokens=t) for t in (1, 4, 16, 64))
    for shape in options.shapes((VIT, SHAPES[2], *few)):
        site = site_of(shape, options.device)
        k = draw_k(site, 0.5)
        nothing = torch.zeros_like(k)
        choosing = {"cost": 1.0, "k_min": 0, "rule": "logits", "machine": site.machine}
        calls: Calls = {
            "dense, eager": dense_call(site),
            "ours": lambda site=site, k=k: gated_call(site, k),
            "learners": lambda site=site, k=k: run(site.x, k, site.weights, machine=site.machine),
            "learners, all k = 0": lambda site=site, k=nothing: run(site.x, k, site.weights, machine=site.machine),
            "gate": lambda site=site, o=choosing: run_gate(site.gate, **o),
            "dispatch": lambda k=k: sort_by_k(k, 4).perm,
        }
        yield from [{"site": shape.name, **row} for row in race(calls, options.rounds)]


PARTS = {"check": check, "tiles": tiles, "ratios": ratios, "line": line, "parts": parts}


def main() -> None:
    """Run the part that the command line names and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--site", default="", metavar="TEXT", help="only sites with this in their name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: answers only, interpreted")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    if chosen.device == "cpu" and (chosen.part != "check" or not INTERPRETED):
        parser.error("--device cpu is for the part check, with TRITON_INTERPRET=1")
    torch.manual_seed(0)
    fine = True
    with torch.no_grad(), open(chosen.out or os.devnull, "w", encoding="utf-8") as out:
        write_row(out, {"part": chosen.part, **about(chosen.device)})
        for row in PARTS[chosen.part](Options(device=chosen.device, rounds=chosen.rounds, wanted=chosen.site)):
            write_row(out, row)
            cells = (f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
            print("  ".join(cells), flush=True)
            fine = fine and row.get("fine", True)
    if not fine:
        raise SystemExit("answers are wrong: no time of this run counts")


def write_row(out: TextIO, row: Row) -> None:
    """Write one line of JSON, at once: what an interrupted run has measured stays."""
    out.write(json.dumps(row) + "\n")
    out.flush()


def about(device: str) -> dict[str, str]:
    """Date, card and versions."""
    card = torch.cuda.get_device_name() if device == "cuda" else f"none (interpreter on {platform.machine()})"
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return {"date": date, "card": card, "torch": torch.__version__, "triton": triton.__version__}


if __name__ == "__main__":
    main()
