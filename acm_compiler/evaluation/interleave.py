"""Times of several calls, taken in turns so that whatever else the machine does hits all of them alike.

With one thread the clock is the processor time of this process, which leaves out what other processes take; with
several, or on an accelerator, it is the wall clock, read when the device has done what it was given.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]
_LEAST_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One contender: median milliseconds of a call, and quartiles of its ratio to the base measured right before."""

    time_ms: float
    ratio: float
    ratio_q1: float
    ratio_q3: float


def interleave(
    calls: Mapping[str, Call], *, base: str, rounds: int = 11, warmup: int = 2, device: str = "cpu"
) -> dict[str, Timing]:
    """Every contender in turn, right after a run of `base`, `rounds` times; times of short calls are means of many.

    The ratio of a round is the contender's time over the mean of the base runs before and after it. device: where the
    calls run.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    repeats = max(1, round(_LEAST_S / max(_seconds(calls[base], 1, device), 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    before = _seconds(calls[base], repeats, device)
    for turn in range(rounds):
        names = [name for name in calls if name != base]
        for name in names if turn % 2 == 0 else reversed(names):
            seconds = _seconds(calls[name], repeats, device)
            after = _seconds(calls[base], repeats, device)
            times[name].append(seconds)
            times[base].append(after)
            ratios[name].append(2 * seconds / (before + after))
            before = after
    ratios[base] = [1.0]
    return {name: _summary(times[name] or [before], ratios[name]) for name in calls}


def clock(device: str = "cpu") -> tuple[str, Callable[[], float]]:
    """The clock's name and the clock."""
    alone = device == "cpu" and torch.get_num_threads() == 1
    return ("processor time", time.process_time) if alone else ("wall time", time.perf_counter)


def _seconds(call: Call, repeats: int, device: str) -> float:
    _, now = clock(device)
    _finish(device)
    start = now()
    for _ in range(repeats):
        call()
    _finish(device)
    return (now() - start) / repeats


def _finish(device: str) -> None:
    """Wait for what an accelerator was given; its calls return before they are done."""
    if device != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def _summary(times: list[float], ratios: list[float]) -> Timing:
    q1, middle, q3 = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Timing(time_ms=1000 * statistics.median(times), ratio=middle, ratio_q1=q1, ratio_q3=q3)
