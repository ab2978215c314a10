"""Load on a server of sentence vectors: what is offered against latency, budget and quality, contender by contender.

    OMP_NUM_THREADS=1 python -m benchmarks.serve_load runs/minilm --slo 200ms --rates 20,40,60 --seconds 20 --rounds 3

The dense model, fixed budgets and the controller are served by the same code, each in a process of its own, all up at
once and loaded in turns. An open loop sends requests of one text each at random times (Poisson) that do not wait for
answers; a latency counts from the time at which a request was due. Quality: a query is the first half of a held-out
paragraph, and is to find the second half among all of them by their dense vectors (recall at 1); and its cosine to its
dense vector. With `--replay` nothing is sent: the batches of the same arrivals run one after the other, and a clock
that counts the processor time of each batch stands in for the wall's, for machines that others use, too.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from acm_compiler.cli.serve import seconds_of
from acm_compiler.runs.given import Given
from acm_compiler.runs.recipe_run import open_saved_run
from acm_compiler.serving.batcher import Example, Limits
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.open_served import ServeOptions, open_served
from acm_compiler.serving.served import Served
from acm_compiler.serving.server import ServerOptions, bind, serve, warm_up

FEWEST_WORDS = 12
BATCH = 8
HEADERS = ("load", "contender", "p50 ms", "p95 ms", "p99 ms", "held", "lost", "budget", "recall", "cosine")


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: which text, its latency in seconds, the budget at its time and its vector, None where it failed."""

    text: int
    latency_s: float
    budget: float
    vector: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Truth:
    """Texts to send, their dense vectors, and the dense vectors of what they are to find."""

    texts: list[str]
    own: np.ndarray
    wanted: np.ndarray

    def quality(self, sent: Sequence[Sent]) -> tuple[float, float]:
        """Recall at 1 and mean cosine of the vectors that came back."""
        came = [s for s in sent if s.vector is not None]
        vectors, numbers = np.stack([s.vector for s in came]), np.array([s.text for s in came])
        recall = float((np.argmax(vectors @ self.wanted.T, axis=1) == numbers).mean())
        return recall, float((vectors * self.own[numbers]).sum(1).mean())


def open_contender(directory: Path, contender: str, *, compiled: bool = False) -> Served:
    """`dense`, one budget such as `.4`, or a controller's range such as `.4:1`; compiled by Inductor or backend acm."""
    served = open_served(directory, Given(), ServeOptions(device="cpu", compiled=compiled))
    if contender == "dense":
        dense = open_saved_run(directory).dense
        assert dense is not None
        served.model, served.found, served.use = dense.eval(), None, None
        served.call = torch.compile(dense, dynamic=True) if compiled else dense
    return served


def controller_of(contender: str, slo_s: float) -> Controller:
    """The controller of a contender: of one budget, or of a range."""
    low, _, high = contender.replace("dense", "1").partition(":")
    return Controller(low=float(low), high=float(high or low), slo_s=slo_s if high else None)


def serve_one(options: argparse.Namespace, slo_s: float) -> None:
    """Serve a contender at a port of its own, until a signal."""
    served = open_contender(options.directory, options.serve, compiled=options.compile)
    controller = controller_of(options.serve, slo_s)
    warm_up(served, controller, print)
    server = ServerOptions(max_body=1_000_000, max_inputs=16, limits=Limits(batch=BATCH))
    with bind("127.0.0.1", 0) as at:
        serve(served, controller, server, at, lambda text: print(text, flush=True))


@contextmanager
def servers(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The address of each contender's server."""
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
            addresses[contender] = found[1]
        yield addresses
    finally:
        for process in started:
            process.terminate()
            process.communicate()


def arrivals(rate: float, seconds: float, count: int, seed: int) -> list[tuple[float, int]]:
    """Times of requests, and which of so many texts each sends."""
    draw, at, found = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        found.append((at, draw.randrange(count)))
    return found


async def load(url: str, truth: Truth, due: Sequence[tuple[float, int]]) -> list[Sent]:
    """Send requests when they are due and wait for all answers."""
    import httpx2

    budget, start = 1.0, time.perf_counter()
    limits = httpx2.Limits(max_connections=512, max_keepalive_connections=512)
    async with httpx2.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def watch() -> None:
            nonlocal budget
            while True:
                budget = (await client.get("/health")).json()["budget"]
                await asyncio.sleep(0.1)

        async def send(at: float, text: int) -> Sent:
            await asyncio.sleep(at - (time.perf_counter() - start))
            asked = {"input": truth.texts[text], "encoding_format": "base64"}
            done = await client.post("/v1/embeddings", json=asked)
            late, vector = time.perf_counter() - start - at, None
            if done.status_code == 200:
                vector = np.frombuffer(base64.b64decode(done.json()["data"][0]["embedding"]), "<f4")
            return Sent(text, late, budget, vector)

        watching = asyncio.create_task(watch())
        sent = await asyncio.gather(*(send(*each) for each in due))
        watching.cancel()
    return list(sent)


def replay(served: Served, controller: Controller, truth: Truth, due: Sequence[tuple[float, int]]) -> list[Sent]:
    """The same requests without a server: the clock stands still but for the processor time of each batch."""
    examples: list[Example] = served.reader.examples(truth.texts)
    sent, now, done = [], 0.0, 0
    while done < len(due):
        now = max(now, due[done][0])
        waiting = sum(at <= now for at, _ in due[done:])
        budget = controller.choose(now, waiting=waiting, oldest_s=now - due[done][0])
        batch = due[done : done + min(waiting, BATCH)]
        began = time.thread_time()
        vectors = served.run([examples[text] for _, text in batch], [None] * len(batch), budget)
        took = time.thread_time() - began
        now, done = now + took, done + len(batch)
        controller.served([now - at for at, _ in batch], batch_s=took)
        sent += [Sent(text, now - at, budget, v.numpy()) for (at, text), v in zip(batch, vectors, strict=True)]
    return sent


def truth_of(directory: Path) -> Truth:
    """Both halves of the paragraphs held out by the recipe, with their dense vectors."""
    paragraphs = [text.split() for text in open_saved_run(directory).data.texts]  # type: ignore[attr-defined]
    halves = [
        (words[: len(words) // 2], words[len(words) // 2 :]) for words in paragraphs if len(words) >= FEWEST_WORDS
    ]
    served = open_contender(directory, "dense")

    def vectors(texts: list[str]) -> np.ndarray:
        examples = served.reader.examples(texts)
        parts = [
            served.run(examples[i : i + 16], [None] * len(examples[i : i + 16]), 1.0) for i in range(0, len(texts), 16)
        ]
        return np.stack([vector.numpy() for part in parts for vector in part])

    texts = [" ".join(first) for first, _ in halves]
    return Truth(texts, vectors(texts), vectors([" ".join(second) for _, second in halves]))


def row(load_: float, contender: str, sent: Sequence[Sent], truth: Truth, slo_s: float) -> dict[str, Any]:
    """The figures of one contender under one load."""
    latencies = np.array([s.latency_s for s in sent])
    p50, p95, p99 = np.percentile(latencies, (50, 95, 99)) * 1e3
    recall, cosine = truth.quality(sent)
    lost, budget = sum(s.vector is None for s in sent), float(np.mean([s.budget for s in sent]))
    held = bool(p95 <= slo_s * 1e3)
    return dict(zip(HEADERS, (load_, contender, p50, p95, p99, held, lost, budget, recall, cosine), strict=True))


def ways(options: argparse.Namespace, truth: Truth, slo_s: float) -> Iterator[dict[str, Callable[..., list[Sent]]]]:
    """Functions that run arrivals through a contender, by its name."""
    names = options.contenders.split(",")
    if not options.replay:
        with servers(options) as urls:
            yield {name: lambda due, url=urls[name]: asyncio.run(load(url, truth, due)) for name in names}
        return
    opened = {name: open_contender(options.directory, name, compiled=options.compile) for name in names}
    for name, served in opened.items():
        warm_up(served, controller_of(name, slo_s), lambda text: None)

    def run(name: str) -> Callable[..., list[Sent]]:
        return lambda due: replay(opened[name], controller_of(name, slo_s), truth, due)

    yield {name: run(name) for name in names}


def main() -> None:
    """Load every contender in turns and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--slo", default="200ms")
    parser.add_argument("--rates", default="20,40,60", help="requests a second")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--contenders", default="dense,1,.6,.4,.4:1")
    parser.add_argument("--replay", action="store_true", help="without a server, by processor time")
    parser.add_argument("--compile", action="store_true", help="the dense model by Inductor, the others by backend acm")
    parser.add_argument("--serve", metavar="CONTENDER", help="serve one of them, for the process that loads it")
    options = parser.parse_args()
    slo_s = seconds_of(options.slo, "--slo")
    torch.set_num_threads(1)
    if options.serve:
        serve_one(options, slo_s)
        return
    truth = truth_of(options.directory)
    print(
        f"{len(truth.texts)} texts; torch {torch.__version__}, 1 thread; SLO {options.slo}, batches of {BATCH} at most"
    )
    for run in ways(options, truth, slo_s):
        for round_ in range(options.rounds):
            rows = []
            for rate in map(float, options.rates.split(",")):
                due = arrivals(rate, options.seconds, len(truth.texts), seed=round_)
                rows += [row(rate, name, of(due), truth, slo_s) for name, of in run.items()]
                print(json.dumps(rows[-len(run) :]), file=sys.stderr, flush=True)
            print(tabulate([list(r.values()) for r in rows], headers=HEADERS, floatfmt=".3g"), flush=True)


if __name__ == "__main__":
    main()
