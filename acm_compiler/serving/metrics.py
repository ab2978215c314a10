"""Counters of a server, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from acm_compiler.serving.served import Used

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one server; `text()` is what /metrics returns."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        to: Any = {"registry": self._registry}
        self._requests = Counter("acm_requests", "Requests answered, by endpoint and status", ["path", "status"], **to)
        self._latency = Histogram(
            "acm_latency_seconds", "Time of an input from its arrival to its answer", buckets=_SECONDS, **to
        )
        self._size = Histogram("acm_batch_size", "Inputs in a batch", buckets=_SIZES, **to)
        self._waiting = Gauge("acm_waiting", "Inputs that wait", **to)
        self._budget = Gauge("acm_budget", "Budget of inputs that name none, a share of learner MACs", **to)
        self._share = Gauge("acm_share", "Share of learner MACs that the last batch ran", **to)
        self._k = Gauge("acm_mean_k", "Mean learners per token in the last batch, by site", ["site"], **to)
        self._deaths = Counter("acm_worker_deaths", "Workers that died and were replaced", **to)
        self.used: Callable[[], Used | None] = lambda: None

    def follow(
        self, *, waiting: Callable[[], int], budget: Callable[[], float], used: Callable[[], Used | None]
    ) -> None:
        """Read these when asked."""
        self._waiting.set_function(waiting)
        self._budget.set_function(budget)
        self.used = used

    def batch(self, latencies_s: Sequence[float], *, budget: float) -> None:
        """Count a batch that is done."""
        self._size.observe(len(latencies_s))
        for latency in latencies_s:
            self._latency.observe(latency)

    def died(self) -> None:
        """Count a worker that died."""
        self._deaths.inc()

    def request(self, path: str, status: int) -> None:
        """Count a request that was answered."""
        self._requests.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """All counters, as Prometheus reads them."""
        if (used := self.used()) is not None:
            self._share.set(used.share)
            for site, mean in used.mean_k.items():
                self._k.labels(site).set(mean)
        return generate_latest(self._registry)
