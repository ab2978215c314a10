"""Texts that are sent, and requests on their way: to a server over HTTP, or to its queue alone, by processor time."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from acm_compiler.runs.opened import open_saved_run
from acm_compiler.serving.batcher import Batcher, Example, Limits
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.served import Served
from benchmarks.serve_load.contenders import BATCH, open_contender

FEWEST_WORDS = 12
RISE_S = 3.0  # connections are opened then


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

    def quality(self, sent: Sequence[Sent]) -> tuple[float, float, float]:
        """Recall at 1, how many points it is below the dense vectors', and mean cosine, of the vectors that came."""
        came = [s for s in sent if s.vector is not None]
        vectors, numbers = np.stack([s.vector for s in came]), np.array([s.text for s in came])
        recall, dense = (
            float((np.argmax(v @ self.wanted.T, axis=1) == numbers).mean()) for v in (vectors, self.own[numbers])
        )
        return recall, 100 * (dense - recall), float((vectors * self.own[numbers]).sum(1).mean())


@dataclass(frozen=True, slots=True)
class Ran:
    """Requests that were sent, the server's processor time in seconds, and the mean k of what it ran."""

    sent: list[Sent]
    processor_s: float
    mean_k: float


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


def tokens_by_k(served: Served) -> dict[str, np.ndarray]:
    """Tokens that ran k = 0, 1, ..., N so far, by site; none of the dense model."""
    return {} if served.use is None else {site: np.array(n) for site, n in served.use.tokens_by_k.items()}


def mean_k(tokens: dict[str, np.ndarray]) -> float:
    """Mean learners per token, the mean over sites; nan of the dense model."""
    return float(np.mean([n @ np.arange(len(n)) / n.sum() for n in tokens.values()])) if tokens else float("nan")


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
