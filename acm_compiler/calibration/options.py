"""What a calibration may be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from acm_compiler.calibration.outputs import Answer, default_answer
from acm_compiler.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much data, time and memory a calibration takes, and what it is for.

    tokens: real tokens to fit each site on. budgets: shares of learner MACs that will be asked for; the lowest k is
    raised only where they stay reachable. answer: (model output, padding mask or None) -> the tensors by which sites
    are judged. projections: random projections of the answer, and so backward passes, per batch. sample: tokens of
    each site kept for its gate, more of sites with few features. gate_steps: optimizer steps per gate. memory_bytes:
    what the statistics of all sites may take at once; beyond it the data is passed over more than once.
    """

    tokens: int = 20_000
    budgets: tuple[float, ...] = ()
    answer: Answer = default_answer
    projections: int = 3
    sample: int = 8192
    gate_steps: int = 300
    memory_bytes: int = 4 * 2**30
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UsageError("a calibration needs tokens", found=self.tokens, expected="at least 1")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise UsageError(
                    "a budget outside its range", found=budget, expected="a share of learner MACs in (0, 1]"
                )
