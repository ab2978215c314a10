"""The choice of a budget under load: observations in, a budget out, no clock and no queue of its own.

A request's latency is what it waits and what its batch takes. The controller lowers the budget by one step where the
latency that it expects of those who wait, or the 95th percentile of those it has seen since its last step, nears the
objective, and to the lowest at once where it expects far more. It raises by one step after a while of little pressure;
a step up that had to be taken back makes that while longer, so that a load between two steps is not tried again and
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from acm_compiler.errors import UsageError

STEPS = 9
# shares of the objective: an expectation above which the budget falls by a step, and to the lowest; a percentile above
# which it falls; what both must stay below for it to rise
_NEAR, _FAR, _SLOW, _CALM = 0.9, 1.3, 0.8, 0.6
_SEEN, _ENOUGH = 256, 16  # latencies that are kept, and how many make a percentile
_WHILE, _LONGEST = 10.0, 32.0  # the time before a step up, in objectives; how many times longer it may become
_MEMORY = 0.8  # weight of what was known about the time of a request


class Controller:
    """The budget of the next batch, between `low` and `high`, for a latency objective of `slo_s` seconds.

    Without an objective it is `high`, always. Times are seconds of any clock that does not go back.
    """

    def __init__(self, *, low: float, high: float, slo_s: float | None = None, steps: int = STEPS) -> None:
        if not low <= high:
            raise UsageError("the lowest budget is above the highest", found=f"{low:.4g} to {high:.4g}")
        if slo_s is not None and not slo_s > 0:
            raise UsageError("a latency objective must be positive", found=slo_s, expected="such as 0.05 seconds")
        count = steps if low < high and slo_s is not None else 1
        self.levels = [high - (high - low) * step / max(1, count - 1) for step in range(count)][::-1]
        self.slo_s, self._at = slo_s, len(self.levels) - 1
        self._latencies: deque[float] = deque(maxlen=_SEEN)
        self._request_s = 0.0
        self._calm_since: float | None = None
        self._patience, self._raised = 1.0, float("-inf")

    @property
    def budget(self) -> float:
        """The budget chosen last."""
        return self.levels[self._at]

    def served(self, latencies_s: Sequence[float], *, batch_s: float) -> None:
        """Add a batch that is done: the latency of each of its requests, and how long it ran."""
        if not latencies_s:
            return
        each = batch_s / len(latencies_s)
        self._request_s = _MEMORY * self._request_s + (1 - _MEMORY) * each if self._request_s else each
        self._latencies.extend(latencies_s)

    def choose(self, now: float, *, waiting: int, oldest_s: float) -> float:
        """The budget of a batch that begins now, with so many requests waiting, the oldest for so long."""
        if self.slo_s is None or len(self.levels) == 1:
            return self.budget
        expected = (oldest_s + waiting * self._request_s) / self.slo_s
        seen = (self.p95() or 0.0) / self.slo_s
        if expected > _NEAR or seen > _SLOW:
            self._lower(now, all_the_way=expected > _FAR)
        elif max(expected, seen) > _CALM or self._at == len(self.levels) - 1:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= self._patience * _WHILE * self.slo_s:
            self._move(1)
            self._raised = now
        return self.budget

    def p95(self) -> float | None:
        """The 95th percentile of the latencies since the last step; None before there are enough of them."""
        if len(self._latencies) < _ENOUGH:
            return None
        return sorted(self._latencies)[int(0.95 * (len(self._latencies) - 1))]

    def _lower(self, now: float, *, all_the_way: bool) -> None:
        wait = self._patience * _WHILE * (self.slo_s or 0.0)
        if now - self._raised < wait:  # it was a step too far
            self._patience = min(2 * self._patience, _LONGEST)
            self._raised = float("-inf")
        elif now - self._raised > 2 * wait:
            self._patience = max(1.0, self._patience / 2)
        self._move(-len(self.levels) if all_the_way else -1)

    def _move(self, steps: int) -> None:
        self._at = min(max(self._at + steps, 0), len(self.levels) - 1)
        self._latencies.clear()
        self._calm_since = None
