"""The choice of a budget under load: observations in, a budget out, no clock and no queue of its own.

What each budget takes is known, by the server's `Pace`. Before each batch the controller looks for the highest budget
at which those who wait are answered in time and what arrives can be borne, and goes down to it at once. It rises by one
step after a while in which the next budget would have done, too. Where the latencies that were seen near the objective
all the same, it goes down by a step; a step up that had to be taken back makes the next while longer, so that a load
between two steps is not tried again and again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from acm_compiler.errors import UsageError
from acm_compiler.serving.pace import Pace

STEPS = 9
# shares of the objective, and of the time there is: expectations of a budget above which it is too much, and up to
# which it may be risen to
_WAIT_MOST, _WAIT_CALM = 0.9, 0.6
_LOAD_MOST, _LOAD_CALM = 0.9, 0.8
_SLOW = 0.8  # a percentile above which the budget falls all the same
_BATCH = 0.4  # of one batch: who comes as one begins waits for it, and for the own one
_SEEN, _ENOUGH = 256, 16  # latencies that are kept, and how many make a percentile
_WHILE, _LONGEST = 10.0, 32.0  # the time before a step up, in objectives; how many times longer it may become
_ARRIVALS = 20.0  # the time over which arrivals are averaged, in objectives
_MEMORY = 0.9  # weight of the padding of all batches before, at each one


class Controller:
    """The budget of the next batch, between `low` and `high`, for a latency objective of `slo_s` seconds.

    Without an objective it is `high`, always, and batches may be as large as they get. Times are seconds of any clock
    that does not go back; sizes are cells, as in `pace`.
    """

    def __init__(self, pace: Pace, *, low: float, high: float, slo_s: float | None = None, steps: int = STEPS) -> None:
        if not low <= high:
            raise UsageError("the lowest budget must be at most the highest", found=f"{low:.4g} to {high:.4g}")
        if slo_s is not None and not slo_s > 0:
            raise UsageError("a latency objective must be positive", found=slo_s, expected="such as 0.05 seconds")
        count = steps if low < high and slo_s is not None else 1
        self.levels = [high - (high - low) * step / max(1, count - 1) for step in range(count)][::-1]
        self.slo_s, self._at = slo_s, len(self.levels) - 1
        self.pace = pace
        self._latencies: deque[float] = deque(maxlen=_SEEN)
        self._rate = _Rate(_ARRIVALS * (slo_s or 0.0))
        self._padded = 1.0  # cells of batches for each that is no padding
        self._calm_since: float | None = None
        self._patience, self._raised = 1.0, float("-inf")

    @property
    def budget(self) -> float:
        """The budget chosen last."""
        return self.levels[self._at]

    @property
    def most_cells(self) -> float:
        """The cells of the largest batch at that budget: a share of the objective; any without one."""
        return math.inf if self.slo_s is None else self.pace.cells_within(self.budget, _BATCH * self.slo_s)

    def served(self, latencies_s: Sequence[float], *, batch_s: float, cells: int, filled: int) -> None:
        """Add a batch that is done: the latency of each of its requests, how long it ran, and its size.

        filled: the cells that are no padding.
        """
        if self.slo_s is None or not latencies_s:
            return
        self.pace.add(self.budget, cells, batch_s)
        self._padded = _MEMORY * self._padded + (1 - _MEMORY) * cells / filled
        self._latencies.extend(latencies_s)

    def choose(self, now: float, *, waiting: int, oldest_s: float, arrived: int) -> float:
        """The budget of a batch that begins now.

        waiting: the cells that wait, the oldest for so long; arrived: all that ever came, these included; padding is
        not among them.
        """
        if self.slo_s is None:
            return self.budget
        self._rate.add(now, arrived)
        if len(self.levels) == 1:
            return self.budget
        bearable = [self._is_borne(at, waiting, oldest_s, _WAIT_MOST, _LOAD_MOST) for at in range(len(self.levels))]
        highest = max((at for at, fits in enumerate(bearable) if fits), default=0)
        seen = (self.p95() or 0.0) / self.slo_s
        if highest < self._at or seen > _SLOW:
            self._lower(now, min(highest, self._at - 1))
        elif self._at == len(self.levels) - 1 or not self._is_calm(waiting, oldest_s):
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= self._patience * _WHILE * self.slo_s:
            self._move(self._at + 1)
            self._raised = now
        return self.budget

    def p95(self) -> float | None:
        """The 95th percentile of the latencies since the last step; None before there are enough of them."""
        if len(self._latencies) < _ENOUGH:
            return None
        return sorted(self._latencies)[int(0.95 * (len(self._latencies) - 1))]

    def _is_calm(self, waiting: int, oldest_s: float) -> bool:
        return self._is_borne(self._at + 1, waiting, oldest_s, _WAIT_CALM, _LOAD_CALM)

    def _is_borne(self, at: int, waiting: int, oldest_s: float, most_wait: float, most_load: float) -> bool:
        """True if a level answers those who wait in that share of the objective, and what arrives in that of time."""
        assert self.slo_s is not None
        line = self.pace.line(self.levels[at])
        most, waiting_cells = (
            max(1.0, self.pace.cells_within(self.levels[at], _BATCH * self.slo_s)),
            waiting * self._padded,
        )
        each_s = line.cell_s + line.call_s / most
        first_s = oldest_s + line.call_s + line.cell_s * min(waiting_cells, most)
        last_s = line.call_s + each_s * waiting_cells
        load = self._rate.cells_s * self._padded * each_s
        return max(first_s, last_s) <= most_wait * self.slo_s and load <= most_load

    def _lower(self, now: float, to: int) -> None:
        wait = self._patience * _WHILE * (self.slo_s or 0.0)
        if now - self._raised < wait:  # it was a step too far
            self._patience = min(2 * self._patience, _LONGEST)
            self._raised = float("-inf")
        elif now - self._raised > 2 * wait:
            self._patience = max(1.0, self._patience / 2)
        self._move(to)

    def _move(self, to: int) -> None:
        self._at = min(max(to, 0), len(self.levels) - 1)
        self._latencies.clear()
        self._calm_since = None


class _Rate:
    """Cells that arrive per second, a mean over about `span_s` seconds; 0 before a tenth of that has passed."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._last: tuple[float, int] | None = None
        self._cells = self._time = 0.0

    @property
    def cells_s(self) -> float:
        return self._cells / self._time if self._time > 0.1 * self._span_s else 0.0

    def add(self, now: float, arrived: int) -> None:
        if self._last is not None:
            time, cells = now - self._last[0], arrived - self._last[1]
            weight = math.exp(-time / self._span_s)
            self._cells, self._time = weight * self._cells + cells, weight * self._time + time
        self._last = now, arrived
