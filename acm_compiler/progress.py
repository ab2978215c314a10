"""How far long work has come: a bar on a terminal, elsewhere a line of text every half minute."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from time import monotonic
from typing import Any

Say = Callable[[str], None]

_EVERY_S = 30.0
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """Counts the steps of one piece of work, and shows them while it is open.

    total: how many steps there will be, None where nobody knows. done: steps done before, by an interrupted run.
    say: takes the lines where no terminal shows a bar; the log, at INFO, when unset. shown: False counts in silence.
    """

    what: str
    total: int | None
    _: KW_ONLY
    unit: str = "step"
    done: int = 0
    say: Say | None = None
    shown: bool = True
    _bar: Any = field(default=None, init=False)
    _first: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _told: float = field(default=0.0, init=False)

    def __enter__(self) -> Progress:
        if self.shown and sys.stderr.isatty():
            from tqdm import tqdm

            line = "{desc} [{elapsed}] {postfix}" if self.total is None else None
            self._bar = tqdm(
                total=self.total, initial=self.done, desc=self.what, unit=self.unit, leave=False, bar_format=line
            )
        self._first, self._began, self._told = self.done, monotonic(), monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, note: str = "") -> None:
        """One more step is done; `note` says what came of it."""
        self.done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif self.shown and monotonic() - self._told >= _EVERY_S:
            self._told = monotonic()
            (self.say or _LOG.info)(", ".join(part for part in (self._count(), note, self._left()) if part))

    def _count(self) -> str:
        return self.what if self.total is None else f"{self.what}: {self.unit} {self.done} of {self.total}"

    def _left(self) -> str:
        """How long the rest takes at the pace so far."""
        if self.total is None:
            return ""
        seconds = (self.total - self.done) * (self._told - self._began) / (self.done - self._first)
        return f"{seconds:.0f} s left" if seconds < 100 else f"{seconds / 60:.0f} min left"


@contextmanager
def telling(what: str, say: Say | None) -> Iterator[Say]:
    """`say` itself; or, without one, something that takes a line after each step and shows the latest while open."""
    if say is not None:
        yield say
        return
    with Progress(what, None) as progress:
        yield progress.advance
