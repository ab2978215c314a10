"""Load on a server of sentence vectors: what is offered against latency, budget and quality, contender by contender.

    pip install aiohttp
    OMP_NUM_THREADS=1 python -m benchmarks.serve_load runs/minilm --slo 200ms --rates 20,40,60 --seconds 20 --rounds 3

The dense model, fixed budgets and the controller are served by the same code, each in a process of its own, all up at
once and loaded in turns; `/int8` behind a contender gives its learners int8 weights, and all linears of the dense one
(torch's quantize_dynamic). An open loop sends requests of one text each at random times (Poisson) that do not wait for
answers; a latency counts from the time at which a request was due. The load rises for some seconds that do not count.
Quality: a query is the first half of a held-out paragraph, or with `--words` those of several of one source, and is to
find the second half among all of them by their dense vectors (recall at 1, and the points by which the dense vectors of
the same queries find more); and its cosine to its dense vector. With `--replay` nothing is sent: the server's own queue
gets the same arrivals, and a clock that counts the processor time of each batch stands in for the wall's, for machines
that others use, too. `--edge` looks for the load up to which the objective holds, from the first of `--rates` on, in
steps that become smaller, to within 6 %; a load is missed where two runs miss it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from acm_compiler.cli.serve import seconds_of
from benchmarks.serve_load.contenders import BATCH, open_contender, serve_one, servers, warm
from benchmarks.serve_load.sending import Ran, Replay, Truth, arrivals, load_server, mean_k, tokens_by_k, truth_of

STEP, CLOSE = 1.3, 1.06
HEADERS = (
    *("load", "contender", "p50 ms", "p95 ms", "p99 ms", "held", "lost", "budget", "mean k", "recall", "points lost"),
    *("cosine", "server ms"),
)


def row(
    load_: float, contender: str, run: Callable[..., Ran], due: Sequence[tuple[float, int]], truth: Truth, slo_s: float
) -> dict[str, Any]:
    """The figures of one contender under one load."""
    ran = run(due)
    counted = [s for s, (at, _) in zip(ran.sent, due, strict=True) if at >= 0]
    latencies = np.array([s.latency_s for s in counted])
    p50, p95, p99 = np.percentile(latencies, (50, 95, 99)) * 1e3
    lost, budget = sum(s.vector is None for s in ran.sent), float(np.mean([s.budget for s in counted]))
    held = bool(p95 <= slo_s * 1e3) and not lost
    each_ms = 1e3 * ran.processor_s / len(ran.sent)
    figures = (load_, contender, p50, p95, p99, held, lost, budget, ran.mean_k, *truth.quality(counted), each_ms)
    return dict(zip(HEADERS, figures, strict=True))


def ways(options: argparse.Namespace, truth: Truth, slo_s: float) -> Iterator[dict[str, Callable[..., Ran]]]:
    """Functions that run arrivals through a contender, by its name."""
    names = options.contenders.split(",")
    if not options.replay:
        with servers(options) as running:
            yield {name: functools.partial(load_server, *running[name], truth) for name in names}
        return
    opened = {name: open_contender(options.directory, name, compiled=options.compile) for name in names}
    made = {name: warm(served, name, slo_s, lambda text: None) for name, served in opened.items()}

    def run(name: str, due: Sequence[tuple[float, int]]) -> Ran:
        served = opened[name]
        before, replay = tokens_by_k(served), Replay(served, made[name](), truth)
        sent = replay.sent(due)
        return Ran(
            sent, replay.processor_s, mean_k({site: now - before[site] for site, now in tokens_by_k(served).items()})
        )

    yield {name: functools.partial(run, name) for name in names}


def rows_of_round(
    options: argparse.Namespace, run: dict[str, Callable[..., Ran]], truth: Truth, slo_s: float, round_: int
) -> list[dict[str, Any]]:
    """A row for each load and contender of a round; of `--edge`, loads are each contender's own."""

    def of(name: str, rate: float, again: int = 0) -> dict[str, Any]:
        due = arrivals(rate, options.seconds, len(truth.texts), seed=2 * round_ + again)
        found = row(rate, name, run[name], due, truth, slo_s)
        print(json.dumps(found), file=sys.stderr, flush=True)
        return found

    rates = [float(rate) for rate in options.rates.split(",")]
    if not options.edge:
        return [of(name, rate) for rate in rates for name in run]
    return [found for name in run for found in edge(functools.partial(of, name), rates[0])]


def edge(of: Callable[..., dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """The rows of the highest load found that holds the objective, and of the lowest above it that does not."""
    held: dict[str, Any] | None = None
    missed: dict[str, Any] | None = None
    while held is None or missed is None or missed["load"] > CLOSE * held["load"]:
        found = of(rate)
        if not found["held"]:
            found = of(rate, again=1)
        held, missed = (found, missed) if found["held"] else (held, found)
        if held and missed:
            rate = (held["load"] * missed["load"]) ** 0.5
        else:
            rate *= STEP if held else 1 / STEP
    return [held, missed]


def main() -> None:
    """Load every contender in turns and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--slo", default="200ms")
    parser.add_argument("--rates", default="20,40,60", help="requests a second")
    parser.add_argument("--words", type=int, default=1, help="put halves of a source together to so many words")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--contenders", default="dense,1,.6,.4,.4:1")
    parser.add_argument("--replay", action="store_true", help="without a server, by processor time")
    parser.add_argument("--edge", action="store_true", help="look for the load that each contender bears")
    parser.add_argument("--compile", action="store_true", help="the dense model by Inductor, the others by backend acm")
    parser.add_argument("--serve", metavar="CONTENDER", help="serve one of them, for the process that loads it")
    options = parser.parse_args()
    slo_s = seconds_of(options.slo, "--slo")
    torch.set_num_threads(1)
    if options.serve:
        serve_one(options, slo_s)
        return
    truth = truth_of(options.directory, options.words)
    print(
        f"{len(truth.texts)} texts; torch {torch.__version__}, 1 thread; SLO {options.slo}, batches of {BATCH} at most"
    )
    for run in ways(options, truth, slo_s):
        for round_ in range(options.rounds):
            rows = rows_of_round(options, run, truth, slo_s, round_)
            print(tabulate([list(r.values()) for r in rows], headers=HEADERS, floatfmt=".3g"), flush=True)


if __name__ == "__main__":
    main()
