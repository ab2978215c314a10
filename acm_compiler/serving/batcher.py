"""Requests put together into batches, which one worker thread runs; it alone touches the model.

A request waits in a queue of bounded length and is a future for those who asked. The next batch is of the request that
has waited longest and those of like size, as many as the controller's objective leaves time for. When a batch fails,
its requests are run one by one, so that a bad one fails alone; when the worker itself dies, the requests that it had
taken fail, and another worker takes its place. Nothing that was taken is dropped: stopping finishes it, and takes
nothing more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from acm_compiler.errors import AcmError
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.pace import like_oldest

_LOG = logging.getLogger(__name__)

Example = dict[str, Any]
Run = Callable[[Sequence[Example], Sequence[float | None], float], Sequence[Any]]


class Refused(Exception):
    """A request that cannot be taken now: too many wait, or the server is stopping."""


class WorkerDied(Exception):
    """The end of a worker while it ran the request."""


class ModelFailed(Exception):
    """An error of the model, and of no other request."""


@dataclass(slots=True, eq=False)
class Job:
    """One example of so many cells to run, at its own budget or the controller's, and the future of its answer."""

    example: Example
    cells: int
    budget: float | None
    arrived: float
    answer: Future[Any] = field(default_factory=Future)


class Watcher(Protocol):
    """Counters of what a batcher does."""

    def batch(self, latencies_s: Sequence[float], *, budget: float) -> None:
        """Count a batch that is done."""

    def died(self) -> None:
        """Count a worker that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest batch; how long a batch waits to be filled, in seconds; how many requests may wait."""

    batch: int = 32
    wait_s: float = 0.002
    waiting: int = 4096


class Batcher:
    """A queue and its worker. `run(examples, own budgets, budget)` gives the answers in order.

    `cells`: the size of an example, see `pace`.
    """

    def __init__(
        self,
        run: Run,
        controller: Controller,
        limits: Limits,
        watcher: Watcher,
        *,
        cells: Callable[[Example], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._controller, self._limits, self._watcher, self._clock = run, controller, limits, watcher, clock
        self._cells, self._arrived = cells, 0
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._taken: list[Job] = []
        self._worker: threading.Thread | None = None
        self.stopping = False

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    @property
    def most(self) -> int:
        """The most requests that may wait."""
        return self._limits.waiting

    @property
    def budget(self) -> float:
        """The budget of requests that name none, now."""
        return self._controller.budget

    def start(self) -> None:
        """Start the worker."""
        self._worker = threading.Thread(target=self._live, name="acm-worker", daemon=True)
        self._worker.start()

    def submit(self, examples: Sequence[Example], budget: float | None = None) -> list[Future[Any]]:
        """The futures of the answers, all or none. Refused when stopping, or when too many wait."""
        now = self._clock()
        jobs = [Job(example, self._cells(example), budget, now) for example in examples]
        with self._changed:
            if self.stopping:
                raise Refused("the server is stopping and takes no new requests: send this one to another")
            if len(self._queue) + len(jobs) > self._limits.waiting:
                raise Refused(
                    f"{len(self._queue)} inputs are waiting already, and at most {self._limits.waiting} may: try again"
                )
            self._queue.extend(jobs)
            self._arrived += sum(job.cells for job in jobs)
            self._changed.notify_all()
        return [job.answer for job in jobs]

    def stop(self) -> None:
        """Take nothing more, finish what was taken, end the worker."""
        self.refuse()
        while (worker := self._worker) is not None and worker.is_alive():
            worker.join()

    def refuse(self) -> None:
        """Take nothing more; what was taken goes on."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()

    def _live(self) -> None:
        """Run batches until stopped. What ends the worker otherwise fails what it had taken and starts another."""
        try:
            while self.run_one():
                pass
        except BaseException:  # noqa: BLE001  # whatever ends a thread has nobody else who hears of it
            _LOG.exception("a worker died with %d requests; starting another", len(self._taken))
            self._bury()

    def run_one(self) -> bool:
        """Wait for a batch and run it; False when stopped and nothing is left."""
        self._taken = self._next()
        ran = bool(self._taken)
        self._serve(self._taken)
        self._taken = []
        return ran

    def _bury(self) -> None:
        lost, self._taken = self._taken, []
        for job in lost:
            if not job.answer.done():
                job.answer.set_exception(WorkerDied("the worker that ran the request died; another has been started"))
        self._watcher.died()
        self.start()

    def _next(self) -> list[Job]:
        """The jobs of the next batch, none when stopped and nothing is left."""
        with self._changed:
            while not self._queue and not self.stopping:
                self._changed.wait()
            self._changed.wait_for(lambda: self.stopping or len(self._queue) >= self._limits.batch, self._limits.wait_s)
            return self._take() if self._queue else []

    def _take(self) -> list[Job]:
        """Take the next batch out of the queue."""
        now, controller = self._clock(), self._controller
        waiting, oldest_s = sum(job.cells for job in self._queue), now - self._queue[0].arrived
        budget = controller.choose(now, waiting=waiting, oldest_s=oldest_s, arrived=self._arrived)
        first = list(islice(self._queue, self._limits.batch))
        sizes, line = [job.cells for job in first], controller.pace.line(budget)
        numbers = like_oldest(sizes, line, most_cells=controller.most_cells)
        taken = [first[number] for number in numbers]
        for _ in range(numbers[-1] + 1):
            self._queue.popleft()
        left = set(range(numbers[-1])) - set(numbers)
        self._queue.extendleft(first[number] for number in sorted(left, reverse=True))
        return taken

    def _serve(self, taken: Sequence[Job]) -> None:
        jobs = [job for job in taken if job.answer.set_running_or_notify_cancel()]
        if not jobs:
            return
        began, budget = self._clock(), self._controller.budget
        try:
            answers = self._run([job.example for job in jobs], [job.budget for job in jobs], budget)
        except Exception as error:  # noqa: BLE001  # whatever a model raises is the requests' to report
            self._apart(jobs, error)
            return
        ended = self._clock()
        latencies = [ended - job.arrived for job in jobs]
        sizes = [job.cells for job in jobs]
        size = {"cells": len(jobs) * max(sizes), "filled": sum(sizes)}
        self._controller.served(latencies, batch_s=ended - began, **size)
        self._watcher.batch(latencies, budget=budget)  # first: who has an answer may ask for the metrics
        for job, answer in zip(jobs, answers, strict=True):
            job.answer.set_result(answer)

    def _apart(self, jobs: Sequence[Job], error: Exception) -> None:
        """Run the jobs of a batch that failed one by one."""
        for job in jobs:
            try:
                if len(jobs) == 1:
                    raise error
                (answer,) = self._run([job.example], [job.budget], self._controller.budget)
            except Exception as own:  # noqa: BLE001  # as above
                _LOG.warning("a request failed: %s: %s", type(own).__name__, own)
                words = f"the model failed on this input: {type(own).__name__}: {own}"
                job.answer.set_exception(own if isinstance(own, AcmError) else ModelFailed(words))
            else:
                job.answer.set_result(answer)
