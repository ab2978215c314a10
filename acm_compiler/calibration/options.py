"""What a calibration may be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from acm_compiler.calibration.outputs import Answer, default_answer
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.runtime.budgets import is_number, parse_budget, share_within, too_much, unreachable
from acm_compiler.runtime.usage import refuse_compiled


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
        check_tokens(self.tokens)
        if not callable(self.answer):
            expected = "a function answer(output, mask) of what the model gives for a batch"
            raise UsageError("answer is asked of every output", found=type(self.answer).__name__, expected=expected)
        for budget in self.budgets:
            _check_share(budget)


def check_tokens(tokens: int) -> None:
    """UsageError for a number of tokens to read that is none."""
    if not is_number(tokens) or not tokens >= 1:
        raise UsageError("a calibration needs tokens", found=repr(tokens), expected="at least 1")


def shares_of(model: nn.Module, budgets: Sequence[float | str]) -> tuple[float, ...]:
    """The `budgets` that a user will ask for, as shares of learner MACs.

    UsageError; BudgetUnreachable for one in "%" or MACs that no setting reaches; CompiledModelError.
    """
    refuse_compiled(model, "calibrated", fix="give the eager model, which torch.compile was given")
    if isinstance(budgets, str) or not isinstance(budgets, Sequence):
        raise UsageError("budgets are a list", found=repr(budgets), expected="such as [0.25, 0.4, '60%']")
    plan = conversion(model).plan
    least, shares = plan.cost.budget_min, []
    for budget in budgets:
        share = share_within(budget, plan, low=0.0) or parse_budget(budget, plan)
        if isinstance(budget, str) and not 0 < share <= 1:
            raise unreachable(budget, plan, low=least)
        _check_share(share, advice=too_much(budget, plan, low=least) if share > 1 else None)
        shares.append(share)
    return tuple(shares)


def _check_share(share: float, *, advice: str | None = None) -> None:
    if not 0 < share <= 1:
        expected = "a share of learner MACs in (0, 1]"
        raise UsageError("a budget outside its range", found=share, expected=expected, fix=advice)
