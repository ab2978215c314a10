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
import asyncio
import base64
import copy
import functools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from acm_compiler.cli.serve import seconds_of
from acm_compiler.runs.given import Given
from acm_compiler.runs.recipe_run import open_saved_run
from acm_compiler.serving.batcher import Batcher, Example, Limits
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.open_served import ServeOptions, open_served
from acm_compiler.serving.served import Served
from acm_compiler.serving.server import ServerOptions, bind, serve, warm_up

FEWEST_WORDS = 12
BATCH = 32
STEP, CLOSE = 1.3, 1.06
RISE_S = 3.0  # connections are opened then
HEADERS = (
    *("load", "contender", "p50 ms", "p95 ms", "p99 ms", "held", "lost", "budget", "mean k", "recall", "points lost"),
    *("cosine", "server ms"),
)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: which text, its latency in seconds, the budget at its time and its vector, None where it failed."""

    text: int
    latency_s: float
    budget: float
    vector: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Ran:
    """Requests that were sent, the server's processor time in seconds, and the mean k of what it ran."""

    sent: list[Sent]
    processor_s: float
    mean_k: float


@dataclass(frozen=True, slots=True)
class Truth:
    """Texts to send, their dense vectors, and the dense vectors of what they are to find."""

    texts: list[str]
    own: np.ndarray
    wanted: np.ndarray

    def quality(self, sent: Sequence[Sent]) -> tuple[float, float, float]:
        """Recall at 1, how many points it is below the dense vectors', and mean cosine, of the vectors that came."""
        came = [s for s in sent if s.vector is not None]
        vectors, numbers = np.stack([s.vector for s in came]), np.array([s.text for s in came])
        recall, dense = (
            float((np.argmax(v @ self.wanted.T, axis=1) == numbers).mean()) for v in (vectors, self.own[numbers])
        )
        return recall, 100 * (dense - recall), float((vectors * self.own[numbers]).sum(1).mean())


def open_contender(directory: Path, contender: str, *, compiled: bool = False) -> Served:
    """`dense`, one budget such as `.4`, or a controller's range such as `.4:1`; compiled by Inductor or backend acm."""
    name, _, form = contender.partition("/")
    options = ServeOptions(device="cpu", compiled=compiled, quantized="int8" if form and name != "dense" else None)
    served = open_served(directory, Given(), options)
    if name == "dense":
        dense = open_saved_run(directory).dense
        assert dense is not None
        if form:
            dense = torch.ao.quantization.quantize_dynamic(dense, {torch.nn.Linear}, dtype=torch.qint8)
        served.model, served.found, served.use = dense.eval(), None, None
        served.call = torch.compile(dense, dynamic=True) if compiled else dense
    return served


def warm(served: Served, contender: str, slo_s: float, say: Callable[[str], None]) -> Callable[[], Controller]:
    """Run a contender, as a server does when it starts; gives a function that makes its controller."""
    low, _, high = contender.partition("/")[0].replace("dense", "1").partition(":")
    bounds = float(low), float(high or low)
    pace = warm_up(served, *bounds, BATCH, say)
    return lambda: Controller(copy.copy(pace), low=bounds[0], high=bounds[1], slo_s=slo_s)


def serve_one(options: argparse.Namespace, slo_s: float) -> None:
    """Serve a contender at a port of its own, until a signal."""
    served = open_contender(options.directory, options.serve, compiled=options.compile)
    controller = warm(served, options.serve, slo_s, print)()
    server = ServerOptions(max_body=1_000_000, max_inputs=16, limits=Limits(batch=BATCH))
    with bind("127.0.0.1", 0) as at:
        serve(served, controller, server, at, lambda text: print(text, flush=True))


@contextmanager
def servers(options: argparse.Namespace) -> Iterator[dict[str, tuple[str, int]]]:
    """The address and the process of each contender's server."""
    command = [sys.executable, "-m", "benchmarks.serve_load", str(options.directory), "--slo", options.slo]
    command += ["--compile", "--serve"] if options.compile else ["--serve"]
    started, addresses = [], {}
    try:
        for contender in options.contenders.split(","):
            process = subprocess.Popen([*command, contender], stdout=subprocess.PIPE, text=True)
            started.append(process)
            assert process.stdout is not None
            found = None
            while found is None and (line := process.stdout.readline()):
                found = re.search(r"at (http://\S+);", line)
            assert found, f"{contender} does not serve"
            addresses[contender] = found[1], process.pid
        yield addresses
    finally:
        for process in started:
            process.terminate()
            process.communicate()


def arrivals(rate: float, seconds: float, count: int, seed: int) -> list[tuple[float, int]]:
    """Times of requests, and which of so many texts each sends; before time 0 for `RISE_S`, while the load rises."""
    draw, at, found = random.Random(seed), -RISE_S, []
    while (at := at + draw.expovariate(rate)) < seconds:
        if at >= 0 or draw.random() < 1 + at / RISE_S:
            found.append((at, draw.randrange(count)))
    return found


def load_server(url: str, process: int, truth: Truth, due: Sequence[tuple[float, int]]) -> Ran:
    """Load one server and read its counters before and after."""
    before, seconds = asyncio.run(counters(url)), processor_seconds(process)
    sent = asyncio.run(load(url, truth, due))
    after, seconds = asyncio.run(counters(url)), processor_seconds(process) - seconds
    return Ran(sent, seconds, mean_k({site: now - before.get(site, 0) for site, now in after.items()}))


def processor_seconds(process: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def counters(url: str) -> dict[str, np.ndarray]:
    """Tokens that ran k = 0, 1, ..., N at each site so far."""
    import aiohttp

    async with aiohttp.ClientSession(url) as client, client.get("/metrics") as answer:
        text = await answer.text()
    found: dict[str, list[float]] = {}
    for _, site, tokens in re.findall(r'^acm_tokens{k="(\d+)",site="([^"]+)"} (\S+)$', text, re.MULTILINE):
        found.setdefault(site, []).append(float(tokens))
    return {site: np.array(tokens) for site, tokens in found.items()}


async def load(url: str, truth: Truth, due: Sequence[tuple[float, int]]) -> list[Sent]:
    """Send requests when they are due and wait for all answers."""
    import aiohttp

    budget, start = 1.0, time.perf_counter() + RISE_S
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client:

        async def watch() -> None:
            nonlocal budget
            while True:
                async with client.get("/health") as answer:
                    budget = (await answer.json())["budget"]
                await asyncio.sleep(0.1)

        async def send(at: float, text: int) -> Sent:
            await asyncio.sleep(at - (time.perf_counter() - start))
            asked, vector = {"input": truth.texts[text], "encoding_format": "base64"}, None
            with suppress(aiohttp.ClientError):
                async with client.post("/v1/embeddings", json=asked) as answer:
                    body = await answer.json()
                if answer.status == 200:
                    vector = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
            return Sent(text, time.perf_counter() - start - at, budget, vector)

        watching = asyncio.create_task(watch())
        sent = await asyncio.gather(*(send(*each) for each in due))
        watching.cancel()
    return list(sent)


class Replay:
    """A server's queue and controller without the server: its clock stands but for the processor time of each batch."""

    def __init__(self, served: Served, controller: Controller, truth: Truth) -> None:
        self._served, self._controller = served, controller
        self._examples: list[Example] = served.reader.examples(truth.texts)
        self._now, self.processor_s = -RISE_S, 0.0
        limits = Limits(batch=BATCH, wait_s=0.0, waiting=1_000_000)
        of = {"cells": served.reader.cells, "clock": lambda: self._now}
        self._batcher = Batcher(self._run, controller, limits, self, **of)

    def _run(self, examples: Sequence[Example], own: Sequence[float | None], budget: float) -> list[Any]:
        began = time.thread_time()
        vectors = self._served.run(examples, own, budget)
        took = time.thread_time() - began
        self._now, self.processor_s = self._now + took, self.processor_s + took
        return [(vector.numpy(), self._now, budget) for vector in vectors]

    def batch(self, latencies_s: Sequence[float], *, budget: float) -> None:
        """Count nothing."""

    def died(self) -> None:
        """Count nothing."""

    def sent(self, due: Sequence[tuple[float, int]]) -> list[Sent]:
        """Send requests when they are due."""
        futures: list[Future[Any]] = []
        while len(futures) < len(due) or self._batcher.waiting:
            end = self._now
            if not self._batcher.waiting:
                end = max(end, due[len(futures)][0])
            while len(futures) < len(due) and due[len(futures)][0] <= end:
                self._now, text = due[len(futures)]
                futures += self._batcher.submit([self._examples[text]])
            self._now = end
            self._batcher.run_one()
        answers = [future.result() for future in futures]
        return [Sent(text, now - at, budget, v) for (at, text), (v, now, budget) in zip(due, answers, strict=True)]


def halves_of(data: Any, fewest: int) -> list[tuple[list[str], list[str]]]:
    """The words of both halves of each paragraph, those of one source put together to `fewest` words a half."""
    open_: dict[int, tuple[list[str], list[str]]] = {}
    found = []
    for words, source in zip((text.split() for text in data.texts), data.sources, strict=True):
        if len(words) < FEWEST_WORDS:
            continue
        first, second = open_.pop(source, ([], []))
        halves = first + words[: len(words) // 2], second + words[len(words) // 2 :]
        if len(halves[0]) < fewest:
            open_[source] = halves
        else:
            found.append(halves)
    return found


def truth_of(directory: Path, fewest: int) -> Truth:
    """Both halves of the paragraphs held out by the recipe, of so many words at least, with their dense vectors."""
    halves = halves_of(open_saved_run(directory).data, fewest)
    served = open_contender(directory, "dense")

    def vectors(texts: list[str]) -> np.ndarray:
        examples = served.reader.examples(texts)
        parts = [
            served.run(examples[i : i + 16], [None] * len(examples[i : i + 16]), 1.0) for i in range(0, len(texts), 16)
        ]
        return np.stack([vector.numpy() for part in parts for vector in part])

    texts = [" ".join(first) for first, _ in halves]
    return Truth(texts, vectors(texts), vectors([" ".join(second) for _, second in halves]))


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


def tokens_by_k(served: Served) -> dict[str, np.ndarray]:
    """Tokens that ran k = 0, 1, ..., N so far, by site; none of the dense model."""
    return {} if served.use is None else {site: np.array(n) for site, n in served.use.tokens_by_k.items()}


def mean_k(tokens: dict[str, np.ndarray]) -> float:
    """Mean learners per token, the mean over sites; nan of the dense model."""
    return float(np.mean([n @ np.arange(len(n)) / n.sum() for n in tokens.values()])) if tokens else float("nan")


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
