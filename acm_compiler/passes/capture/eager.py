"""A user's compiled functions run as the eager code that they were."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch


class Eager:
    """Turns torch.compile off while anyone holds it; its stance is one for all threads, so the last one restores it."""

    def __init__(self) -> None:
        self._lock, self._holders, self._stance = threading.Lock(), 0, contextlib.ExitStack()
        self._forced = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Compiled functions run as the eager code that they were within it."""
        with self._lock:
            self._holders += 1
        try:
            self.force()
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._forced = False
                    self._stance.close()

    def force(self) -> None:
        """See to it while it is held, once anything is compiled: before, the import would take seconds."""
        with self._lock:
            if self._holders and not self._forced and "torch._dynamo" in sys.modules:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
                self._forced = True


EAGER = Eager()
