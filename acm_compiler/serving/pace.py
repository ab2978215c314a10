"""The time that a batch takes, by its budget and its size: measured when a server starts, corrected while it serves.

Sizes are cells: tokens of a text, 1 for an image. A batch has as many as its longest example times its examples,
padding included, and takes `call_s + cell_s * cells` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_MEMORY = 0.9  # weight of what was known about how much longer batches take than they did at the start
_FARTHEST = 20.0  # no batch, however odd, says that all take more or less than so many times as long


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a call, and of each of its cells."""

    call_s: float
    cell_s: float


class Pace:
    """Seconds of batches, from a `Line` for each of some budgets; between two of them linear, beyond them constant."""

    def __init__(self, lines: dict[float, Line]) -> None:
        self._budgets = sorted(lines)
        self._call_s = [lines[budget].call_s for budget in self._budgets]
        self._cell_s = [lines[budget].cell_s for budget in self._budgets]
        self._found: dict[float, Line] = {}
        self._longer = 1.0

    def line(self, budget: float) -> Line:
        """The line of a budget, as batches take now."""
        line = self._found.get(budget)
        if line is None:
            line = Line(*(float(np.interp(budget, self._budgets, of)) for of in (self._call_s, self._cell_s)))
            self._found[budget] = line
        return Line(self._longer * line.call_s, self._longer * line.cell_s)

    def seconds(self, budget: float, cells: float) -> float:
        """Seconds of a batch."""
        line = self.line(budget)
        return line.call_s + line.cell_s * cells

    def cells_within(self, budget: float, seconds: float) -> float:
        """The cells of the largest batch that takes so long."""
        line = self.line(budget)
        return max(0.0, (seconds - line.call_s) / line.cell_s)

    def add(self, budget: float, cells: float, seconds: float) -> None:
        """Add a batch that has run: what all batches take follows it, slowly."""
        ratio = seconds / self.seconds(budget, cells) * self._longer
        ratio = min(max(ratio, 1 / _FARTHEST), _FARTHEST)
        self._longer = _MEMORY * self._longer + (1 - _MEMORY) * ratio


def measure_pace(seconds_of: Callable[[float, int], float], budgets: Sequence[float], *, few: int, many: int) -> Pace:
    """The pace of `seconds_of(budget, cells)`, measured at two sizes, `few` and `many` cells, for each budget."""
    return Pace({budget: _line(few, seconds_of(budget, few), many, seconds_of(budget, many)) for budget in budgets})


def _line(few: int, few_s: float, many: int, many_s: float) -> Line:
    """The line through two measurements; where noise makes it fall, one through the larger alone."""
    cell_s = (many_s - few_s) / (many - few) if many > few else 0.0
    call_s = few_s - cell_s * few
    return Line(call_s, cell_s) if cell_s > 0 and call_s >= 0 else Line(0.0, many_s / many)


def like_oldest(sizes: Sequence[int], line: Line, *, most_cells: float) -> list[int]:
    """The examples to run next, by their number in `sizes`, which are in order of arrival; the oldest is among them.

    All are sorted by size and cut into batches of at most `most_cells`, padding included, where calls of their own cost
    less than the padding; the batch that holds the oldest is next, in order of arrival. The others stay.
    """
    order = sorted(range(len(sizes)), key=lambda number: sizes[number])
    cuts = _cheapest_cuts([sizes[number] for number in order], line, most_cells)
    place = order.index(0)
    start = max(cut for cut in cuts if cut <= place)
    end = min(cut for cut in cuts if cut > place)
    return sorted(order[start:end])


def _cheapest_cuts(rising: Sequence[int], line: Line, most_cells: float) -> list[int]:
    """Cuts of sizes in rising order, ends included, so that the batches between them together take least."""
    least, before = [0.0], [0]
    for end, size in enumerate(rising, 1):
        first = max(0, end - max(1, int(min(end, most_cells / size))))
        costs = [least[start] + line.call_s + line.cell_s * (end - start) * size for start in range(first, end)]
        cheapest = min(range(len(costs)), key=costs.__getitem__)
        least.append(costs[cheapest])
        before.append(first + cheapest)
    cuts = [len(rising)]
    while cuts[-1]:
        cuts.append(before[cuts[-1]])
    return cuts
