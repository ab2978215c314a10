"""Examples of no use: found by whichever process reads them, counted and named together.

Shapes: E examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

LeftOut = Mapping[str, Sequence[str]]  # from what is wrong with examples to their names
_NAMED = 3


class LeftOutLedger:
    """Which of `names` are of no use, and which of `faults` they have; one memory for all processes that load."""

    def __init__(self, names: Sequence[str], faults: Sequence[str]) -> None:
        self.names, self._faults = names, faults
        self._fault_E = torch.zeros(len(names), dtype=torch.uint8).share_memory_()  # 0: none

    def __len__(self) -> int:
        return int(self._fault_E.count_nonzero())

    def add(self, number: int, fault: str) -> bool:
        """Note what is wrong with an example; False where it was known."""
        new = not self._fault_E[number]
        self._fault_E[number] = 1 + self._faults.index(fault)
        return new

    def by_fault(self) -> dict[str, tuple[str, ...]]:
        """The names of what was found so far, whichever process found it, by what is wrong."""
        found = {
            fault: tuple(self.names[i] for i in (self._fault_E == 1 + number).nonzero().flatten().tolist())
            for number, fault in enumerate(self._faults)
        }
        return {fault: names for fault, names in found.items() if names}


def left_out(dataset: Any) -> dict[str, tuple[str, ...]]:
    """What a data set has left out so far, by what is wrong; nothing where it does not say."""
    return {fault: tuple(names) for fault, names in getattr(dataset, "left_out", {}).items()}


def told(found: LeftOut) -> str:
    """Counts and a few names: `2 missing (a.mp3, b.mp3), 1 empty (c.mp3)`."""
    return ", ".join(
        f"{len(names):,} {fault} ({', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''})"
        for fault, names in found.items()
    )
