"""Measured times of a model's calls at its budgets, as `acmc bench` keeps them: from a time to a budget."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from acm_compiler.errors import BudgetUnreachable

_TIME = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s)(?:\s+at\s+(?:batch\s+)?([1-9][0-9]*))?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTime:
    """Milliseconds that a call with so many examples may take."""

    ms: float
    batch: int

    def __str__(self) -> str:
        return f"{self.ms:g} ms at batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """Milliseconds of one call of the compiled model with `batch` examples at a budget, a share of learner MACs."""

    batch: int
    budget: float
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """All calls that were measured, and the device's name as `device_name` gives it."""

    device: str
    calls: tuple[CallTime, ...]

    def budget_within(self, asked: AskedTime) -> float:
        """The largest budget whose call took no longer, at the batch measured that is nearest to the one asked for.

        Nearest by ratio; of two as near, the larger. BudgetUnreachable where every budget took longer.
        """
        batch = min({call.batch for call in self.calls}, key=lambda size: (abs(math.log(size / asked.batch)), -size))
        calls = [call for call in self.calls if call.batch == batch]
        fast = [call.budget for call in calls if call.ms <= asked.ms]
        if fast:
            return max(fast)
        least = min(calls, key=lambda call: call.ms)
        raise BudgetUnreachable(
            "at every budget that was measured a call takes longer",
            found=str(asked),
            expected=f"{least.ms:.4g} ms or more: budget {least.budget:g} at batch {batch}, on {self.device}",
            fix="give more time; or measure lower budgets, smaller batches: acmc bench DIR --budgets B,B --batches N,N",
        )


def asked_time(budget: object) -> AskedTime | None:
    """The time that a budget asks for, such as "9 ms", or "9 ms at 8" for a batch of 8; None for other budgets."""
    found = _TIME.fullmatch(budget) if isinstance(budget, str) else None
    if found is None:
        return None
    return AskedTime(ms=float(found[1]) * (1 if found[2] == "ms" else 1000), batch=int(found[3] or 1))


def device_name(device: torch.device) -> str:
    """The device as measurements name it: a GPU's card, a CPU with its vectors."""
    if device.type == "cpu":
        return f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
