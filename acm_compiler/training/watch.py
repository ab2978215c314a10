"""Watch a run: its metrics.jsonl, gates that collapse, a missed budget, Ctrl-C and SIGTERM, which stop it after a step.

metrics.jsonl: one line per optimizer step, one per measurement in between, one per phase in closed form.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from acm_compiler.errors import RunInterrupted, StorageError, a_few_of
from acm_compiler.files import remedy
from acm_compiler.training.phase import Figures
from acm_compiler.training.state import what_remains

log = logging.getLogger(__name__)

WINDOW = 50  # optimizer steps at the end of a phase
COLLAPSED = 0.999  # share of tokens on one choice
MISSED = 0.01


class Watch:
    """Keeps the figures of the last steps of a phase and warns at its end."""

    def __init__(self) -> None:
        self._recent: deque[Figures] = deque(maxlen=WINDOW)

    def see(self, figures: Figures) -> None:
        """Add one step."""
        self._recent.append(figures)

    @property
    def reached(self) -> float | None:
        """The mean share of learner MACs over the last steps."""
        shares = [figures.reached for figures in self._recent if figures.reached is not None]
        return sum(shares) / len(shares) if shares else None

    def collapsed(self) -> dict[str, int]:
        """The sites with a choice of k where all tokens took the same one, and which, counted from 0."""
        found = {}
        for site, counts in self._counts().items():
            total, most = sum(counts), max(counts)
            if len(counts) > 1 and total and most >= COLLAPSED * total:
                found[site] = counts.index(most)
        return found

    def _counts(self) -> dict[str, list[float]]:
        total: dict[str, list[float]] = {}
        for figures in self._recent:
            for site, counts in figures.choices.items():
                before = total.get(site, [0.0] * len(counts))
                total[site] = [a + b for a, b in zip(before, counts, strict=True)]
        return total


def warn_of_collapse(watch: Watch, phase: str, k_min: Mapping[str, int], *, remedy: str) -> None:
    """Warn where a gate gives every token the same k: such a site adapts to nothing. `k_min` is that of every site."""
    collapsed = watch.collapsed()
    if collapsed:
        named = [f"{site} (k = {k_min[site] + choice})" for site, choice in collapsed.items()]
        log.warning(
            "%s: %d of %d gates run the same k for every token: %s\n  %s",
            phase,
            len(collapsed),
            len(k_min),
            a_few_of(named),
            remedy,
        )


def warn_of_missed_budget(watch: Watch, budget: float) -> None:
    """Warn where finetuning ended at another budget than it was asked for."""
    reached = watch.reached
    if reached is not None and abs(reached - budget) > MISSED:
        log.warning(
            "finetune: the gates spend %.3f of the learner MACs in training, asked for %.3f\n"
            "  raise the weight `budget` of the finetune phase, or train it for longer; "
            "set_budget serves this and other budgets all the same, by the measured table",
            reached,
            budget,
        )


class Journal:
    """Appends lines to a file; every line is complete when `write` returns. Without a path it keeps nothing.

    `keep_bytes`: how much of an earlier run's file stays; what was written after its last saved state is cut off.
    """

    def __init__(self, path: Path | None, *, keep_bytes: int = 0) -> None:
        self.path = path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab")
            self.file.truncate(keep_bytes)
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, line: dict[str, Any]) -> None:
        """Add one line. StorageError when the disk does not take it."""
        if self.path is None:
            return
        plain = {name: _plain(value) for name, value in line.items()}
        try:
            self.file.write(json.dumps(plain).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return 0 if self.path is None else self.file.tell()

    def close(self) -> None:
        """Let go of the file."""
        if self.path is not None:
            self.file.close()


def _plain(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        "metrics cannot be written",
        where=str(path),
        found=error.strerror or error,
        fix=f"{remedy(error)}; {what_remains(path.parent)}",
    )


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

    def stopped(self, where: str, resume_command: str) -> RunInterrupted:
        """The error for work that stops here with its state saved."""
        by = self.received.name if self.received else "another process"
        return RunInterrupted(f"stopped by {by} after {where}; the state is saved", fix=f"continue: {resume_command}")

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
