"""Counters of a server, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from acm_compiler.serving.recalibration import Recalibration
from acm_compiler.serving.served import RecentUsage

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
        self._drift = Gauge("acm_drift", "Share of learner MACs reached minus promised, recent batches", **to)
        self._k = Gauge("acm_mean_k", "Mean learners per token since the start, by site", ["site"], **to)
        self._tokens = Gauge("acm_tokens", "Tokens that ran k learners since the start, by site", ["site", "k"], **to)
        self._deaths = Counter("acm_worker_deaths", "Workers that died and were replaced", **to)
        self._use: RecentUsage | None = None

    def follow(self, *, waiting: Callable[[], int], budget: Callable[[], float], use: RecentUsage | None) -> None:
        """Read these when asked."""
        self._waiting.set_function(waiting)
        self._budget.set_function(budget)
        self._use = use

    def follow_recalibration(self, recalibration: Recalibration) -> None:
        """Read its state when asked."""
        to: Any = {"registry": self._registry}
        done = Gauge("acm_recalibrations", "Budget tables measured anew since the start", **to)
        done.set_function(lambda: recalibration.done)
        running = Gauge("acm_recalibrating", "1 while a budget table is being measured", **to)
        running.set_function(lambda: recalibration.is_running)

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
        if self._use is not None and self._use.share is not None:
            self._share.set(self._use.share)
            self._drift.set(self._use.drift or 0.0)
            for site, tokens in self._use.tokens_by_k.items():
                self._k.labels(site).set(sum(k * count for k, count in enumerate(tokens)) / max(1, sum(tokens)))
                for k, count in enumerate(tokens):
                    self._tokens.labels(site, str(k)).set(count)
        return generate_latest(self._registry)
