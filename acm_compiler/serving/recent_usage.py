"""Use of the learners by what is served: how much each batch ran, and how far that is from what the table promised."""

from __future__ import annotations

import logging
from collections.abc import Callable

from acm_compiler.runtime.meter import TOLERANCE, Meter, drift_text

_LOG = logging.getLogger(__name__)
_MEMORY = 0.999  # weight of all batches before, at each one
_ENOUGH = 100  # batches, before a drift is worth a warning
_AGAIN = (
    "a server with --recalibrate asked measures it again on POST /recalibrate, one with --recalibrate drift by itself"
)


class RecentUsage:
    """The last batch's share of learner MACs, and the mean distance of recent shares from those promised.

    Where that leaves the tolerance, the log says so, and `on_drift` is called: once, until `restart`.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.on_drift: Callable[[], None] | None = None
        self.begin()

    def begin(self) -> None:
        """Count from here on: what ran before was no request."""
        self._meter.reset()
        self._seen = self._meter.macs
        self.share: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forget what was promised, as where a table takes the place of another."""
        self._run = self._promised = self._full = 0.0
        self._batches, self._warned = 0, False

    @property
    def drift(self) -> float | None:
        """Share reached minus share promised, over recent batches; None before any."""
        return (self._run - self._promised) / self._full if self._full else None

    @property
    def tokens_by_k(self) -> dict[str, list[int]]:
        """Numbers of tokens that ran k = 0, 1, ..., N, by site."""
        return {name: counts.tolist() for name, counts in self._meter.k.items()}

    def add(self, promised: float | None) -> None:
        """Add what ran since the last call, a batch of one budget that promised this share; None: of several."""
        now = self._meter.macs
        run, full = now[0] - self._seen[0], now[1] - self._seen[1]
        self._seen = now
        if not full:
            return
        self.share = run / full
        if promised is None:
            return
        self._run, self._promised = _MEMORY * self._run + run, _MEMORY * self._promised + promised * full
        self._full, self._batches = _MEMORY * self._full + full, self._batches + 1
        if not self._warned and self._batches >= _ENOUGH and abs(self.drift or 0.0) > TOLERANCE:
            self._warned = True
            said = drift_text(self._run / self._full, self._promised / self._full)
            _LOG.warning(said if self.on_drift is not None else f"{said}; {_AGAIN}")
            if self.on_drift is not None:
                self.on_drift()
