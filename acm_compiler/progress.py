"""Progress of long work: a bar on a terminal, elsewhere a line of text every ten seconds at most."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from time import monotonic
from typing import Any, TypeVar

from acm_compiler.errors import UsageError

Say = Callable[[str], None]
Item = TypeVar("Item")

_EVERY_S = 10.0
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """Counts the steps of one piece of work, or of its parts one after the other, and shows them while it is open.

    total: how many steps there will be, None where nobody knows. done: steps done before, by an interrupted run.
    Where steps say how many examples they took, lines tell how many there are per second and, for data that came
    through `fed`, what share of the time the work waited for it.
    say: takes the lines where no terminal shows a bar; when unset, the log at INFO, and stderr for steps that it does
    not listen to. each: every step is a line, and nothing is a bar. shown: False counts in silence.
    """

    what: str
    total: int | None = None
    _: KW_ONLY
    unit: str = "step"
    done: int = 0
    say: Say | None = None
    each: bool = False
    shown: bool = True
    _bar: Any = field(default=None, init=False)
    _first: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _told: float = field(default=0.0, init=False)
    _examples: int = field(default=0, init=False)
    waited: float = field(default=0.0, init=False)

    def __enter__(self) -> Progress:
        self._told = monotonic()
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def part(self, unit: str, total: int | None, *, done: int = 0) -> None:
        """Go on with another part of the work, which has so many steps; time left is that of this part."""
        self.unit, self.total, self.done = unit, total, done
        self._begin()

    def advance(self, note: str = "", *, to: int | None = None, examples: int = 0) -> None:
        """One more step is done, or all up to `to`, with so many examples; `note` says what came of it."""
        self.done = self.done + 1 if to is None else to
        self._examples += examples
        now = monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(_listed(note, self._pace(now)), refresh=False)
            self._bar.update(self.done - self._bar.n)
        elif self.shown and (self.each or now - self._told >= _EVERY_S):
            self._told = now
            (self.say or _aloud)(_listed(self._count(), note, self._pace(now), self._left(now)))

    def fed(self, source: Iterable[Item]) -> Iterator[Item]:
        """The same items; the time until each of them comes is waiting."""
        items = iter(source)
        while True:
            asked = monotonic()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.waited += monotonic() - asked
            yield item

    def line(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.clear()
        (self.say or _LOG.info)(text)
        if self._bar is not None:
            self._bar.refresh()

    def finish(self, part: str) -> None:
        """Report that a part is done, and the time it took."""
        now = monotonic()
        self.line(f"{self.what}: {part}, {duration(now - self._began)}")
        self._began = now

    def _begin(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.shown and not self.each and sys.stderr.isatty():
            from tqdm import tqdm

            line = "{desc} [{elapsed}] {postfix}" if self.total is None else None
            self._bar = tqdm(
                total=self.total, initial=self.done, desc=self.what, unit=self.unit, leave=False, bar_format=line
            )
        self._first, self._began = self.done, monotonic()

    def _count(self) -> str:
        return self.what if self.total is None else f"{self.what}: {self.unit} {self.done:,} of {self.total:,}"

    def _pace(self, now: float) -> str:
        """Examples a second so far, and the part of the time spent waiting for them, as text."""
        seconds = now - self._began
        if not self._examples or seconds <= 0:
            return ""
        pace = f"{self._examples / seconds:.3g} examples/s"
        share = self.waited / seconds
        return f"{pace}, {share:.0%} of the time waiting for data" if share >= 0.005 else pace

    def _left(self, now: float) -> str:
        """Time that the rest takes at the pace so far, as text."""
        if self.total is None or self.done <= self._first:
            return ""
        seconds = (self.total - self.done) * (now - self._began) / (self.done - self._first)
        return f"{duration(seconds, digits=0)} left"


@contextmanager
def progress_of(what: str, say: Say | Progress | None) -> Iterator[Progress]:
    """While open, the progress of work for a caller who asked `say` to hear every step, or for nobody in particular.

    A `Progress` of a larger piece of work goes on. UsageError for a `say` that cannot be called.
    """
    if isinstance(say, Progress):
        yield say
        return
    if say is not None and not callable(say):
        expected = "what takes a line of text, such as print, or None"
        raise UsageError("progress must be callable: str -> None", found=repr(say), expected=expected)
    with Progress(what, say=say, each=say is not None) as progress:
        yield progress


def _listed(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def duration(seconds: float, *, digits: int = 1) -> str:
    """A time for people: 46 s, 5.2 min."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.{digits}f} min"


def _aloud(text: str) -> None:
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info(text)
    else:
        sys.stderr.write(f"{text}\n")
