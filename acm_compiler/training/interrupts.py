"""Ctrl-C and SIGTERM ask a run to stop; it stops after the step at hand, with its state saved."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Remembers the first signal. A second one has its usual effect at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, signals are remembered. Outside of the main thread, where that is impossible, nothing changes."""
        self._watch()
        try:
            yield
        finally:
            self._restore()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside `watched`, signals have their usual effect at once again: for work that leaves nothing half-done."""
        self._restore()
        try:
            yield
        finally:
            if self.received is None:
                self._watch()

    def _watch(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        log.warning("%s: stopping after this step, with the state saved; once more stops at once", self.received.name)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
