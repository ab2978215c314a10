"""How far long work has come: a bar on a terminal, elsewhere a line of text every half minute."""

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

_EVERY_S = 30.0
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """Counts the steps of one piece of work, and shows them while it is open.

    total: how many steps there will be, None where nobody knows. done: steps done before, by an interrupted run.
    Where steps say how many examples they took, lines tell how many there are per second and, for data that came
    through `fed`, what share of the time the work waited for it.
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
    _examples: int = field(default=0, init=False)
    waited: float = field(default=0.0, init=False)

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

    def advance(self, note: str = "", *, examples: int = 0) -> None:
        """One more step is done, which took so many examples; `note` says what came of it."""
        self.done += 1
        self._examples += examples
        now = monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(_listed(note, self._pace(now)), refresh=False)
            self._bar.update()
        elif now - self._told >= _EVERY_S:
            self._told = now
            self.line(_listed(self._count(), note, self._pace(now), self._left()))

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
        """Say something that stays, above the bar if there is one."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.clear()
        (self.say or _LOG.info)(text)
        if self._bar is not None:
            self._bar.refresh()

    def _count(self) -> str:
        return self.what if self.total is None else f"{self.what}: {self.unit} {self.done} of {self.total}"

    def _pace(self, now: float) -> str:
        """How many examples a second the work has taken so far, and how much of the time it waited for them."""
        seconds = now - self._began
        if not self._examples or seconds <= 0:
            return ""
        pace = f"{self._examples / seconds:.3g} examples/s"
        share = self.waited / seconds
        return f"{pace}, {share:.0%} of the time waiting for data" if share >= 0.005 else pace

    def _left(self) -> str:
        """How long the rest takes at the pace so far."""
        if self.total is None:
            return ""
        seconds = (self.total - self.done) * (self._told - self._began) / (self.done - self._first)
        return f"{seconds:.0f} s left" if seconds < 100 else f"{seconds / 60:.0f} min left"


class Teller:
    """What work of several parts tells: `step` takes a line after each step, `said` one at the end of each part."""

    def __init__(self, what: str, *, step: Say, said: Say) -> None:
        self.what, self._step, self._said = what, step, said
        self._began = monotonic()

    def __call__(self, note: str) -> None:
        """One more step is done."""
        self._step(note)

    def done(self, part: str) -> None:
        """A part is done; how long it took is told with it."""
        now = monotonic()
        self._said(f"{self.what}: {part}, {duration(now - self._began)}")
        self._began = now


@contextmanager
def telling(what: str, say: Say | None) -> Iterator[Teller]:
    """While open, something that `say` hears every step and every part of.

    Without `say`, or where it is a `Teller` of a larger piece of work, a terminal shows the latest step, and a line is
    told every half minute elsewhere: by the log where it listens at INFO, else on stderr. UsageError for a `say` that
    cannot be called.
    """
    if say is not None and not callable(say):
        expected = "what takes a line of text, such as print, or None"
        raise UsageError("progress cannot be told to this", found=repr(say), expected=expected)
    if isinstance(say, Teller):
        yield say
    elif say is not None:
        yield Teller(what, step=say, said=say)
    else:
        with Progress(what, None, say=_aloud) as progress:
            yield Teller(what, step=progress.advance, said=_LOG.info)


@contextmanager
def telling_parts(what: str, say: Say, *, shown: bool = True) -> Iterator[Teller]:
    """While open, something that tells `say` of every part, and of the latest step every half minute.

    A terminal shows the latest step all the time. shown: False tells nothing.
    """
    with Progress(what, None, say=say, shown=shown) as progress:
        yield Teller(what, step=progress.advance, said=progress.line)


def _listed(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """A time for people: 46 s, 5.2 min."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _aloud(text: str) -> None:
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info(text)
    else:
        sys.stderr.write(f"{text}\n")
