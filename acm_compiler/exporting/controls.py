"""A rewritten model whose budget is an input, as graphs are made of it: one for every budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from acm_compiler.acm.context import Said, batch_held
from acm_compiler.acm.module import RUN_TIME
from acm_compiler.errors import UsageError, a_few_of, did_you_mean
from acm_compiler.exporting.calls import Control
from acm_compiler.passes.rewrite.conversion import BudgetTable, Rewritten
from acm_compiler.runtime.budgets import PRINTED, TOLERANCE, Rows, interpolate, rows_of

# budgets are given as float32, whose nearest number to a decimal fraction is not that of the table
_DECIMALS = 6
Require = Callable[[Tensor, Tensor, str], Tensor]


class Controlled(nn.Module):
    """A rewritten model that takes its controls as keyword arguments: tensors, read anew at each call.

    budget: a share of learner MACs, float32 [], or [batch] with `per_example`; the budget table becomes part of the
    module. cap: an upper bound on every token's k as a share of N, float32 []. k_lo, k_hi: bounds on every token's k,
    int64 []. At budget 1 every token runs k_hi learners, or as many as the cap allows. What is out of range is refused
    by a RuntimeError, from inside of graphs too: `require` gives a value back where a condition holds for all of it,
    or does not ask, and the nearest value in range counts.
    """

    share: Tensor
    knob: Tensor
    k_lo: Tensor
    jumps: Tensor

    def __init__(self, found: Rewritten, controls: tuple[Control, ...], *, per_example: bool, require: Require) -> None:
        super().__init__()
        self.require = require
        self.model, self.controls, self.per_example = found.model, controls, per_example
        self.acms, self.owner = found.acms, found.owner
        self.low, self.most = found.owner.table_min, max(acm.count for acm in found.acms.values())
        for name, tensor in rows_of(measured(found))._asdict().items():
            self.register_buffer(name, tensor.to(next(iter(found.acms.values())).knob.device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in self.controls}
        knob_B, k_lo_B = self._settings(given)
        if self.per_example:
            most = torch.stack([self._highest(count, given) for count in range(self.most + 1)])
            with batch_held(self.owner, Said(knob=knob_B, k_lo=k_lo_B, most=most, each=True)):
                return self.model(*args, **kwargs)
        values: dict[str, Tensor] = {}
        for path, acm in self.acms.items():
            high = self._highest(acm.count, given).clamp(acm.k_min, acm.count)
            low = torch.minimum(k_lo_B.reshape(()), high).clamp(min=acm.k_min)
            bits = knob_B.reshape(()).view(torch.int32)
            values |= {f"{path}.{name}": value for name, value in zip(RUN_TIME, 2 * (bits, low, high), strict=True)}
        return torch.func.functional_call(self.model, values, args, kwargs)

    def _settings(self, given: Mapping[Control, Tensor]) -> tuple[Tensor, Tensor]:
        """The gates' knob and lowest k, [B], or [1] for all examples."""
        budget = given["budget"]
        fits = (budget >= self.low - PRINTED) & (budget <= 1 + PRINTED)
        budget = self.require(budget, fits, _wanted("budget", self.low, 1)).reshape(-1)
        exact = _decimal(budget).clamp(self.low, 1)
        knob, k_lo, _ = interpolate(Rows(self.share, self.knob, self.k_lo, self.jumps), exact)
        runs_all = exact >= 1 - TOLERANCE
        k_lo = torch.where(runs_all, self.most, k_lo)
        if "k_lo" in given:
            k_lo = torch.maximum(k_lo, self._learners(given, "k_lo"))
        return torch.where(runs_all, 0, knob).float(), k_lo.to(torch.int32)

    def _highest(self, count: int, given: Mapping[Control, Tensor]) -> Tensor:
        """The most of `count` learners that the cap and k_hi let a token run."""
        high = torch.full((), count, dtype=torch.int32, device=self.share.device)
        if "cap" in given:
            fits = (given["cap"] > 0) & (given["cap"] <= 1)
            cap = self.require(given["cap"], fits, "cap must be above 0 and at most 1")
            high = (_decimal(cap).clamp(0, 1) * count + TOLERANCE).to(torch.int32)
        if "k_hi" in given:
            high = torch.minimum(high, self._learners(given, "k_hi").to(torch.int32))
        return high

    def _learners(self, given: Mapping[Control, Tensor], name: Control) -> Tensor:
        """A bound of k."""
        k = given[name]
        return self.require(k, (k >= 0) & (k <= self.most), _wanted(name, 0, self.most)).clamp(0, self.most)


def measured(found: Rewritten) -> BudgetTable:
    """The budget table. UsageError for a model that has none, or sites without learners."""
    dense = [name for name, acm in found.acms.items() if acm.state == "dense"]
    if found.owner.table is not None and not dense:
        return found.owner.table
    raise UsageError(
        "no budget can be an input: the gates of this model have not been measured",
        found=f"no learners at {a_few_of(dense, 1)}" if dense else "no budget table",
        fix="acm.calibrate(model, batches), or a recipe's gate phase; or export one k: fixed_k=2 (--fixed-k 2)",
    )


def check_controls(controls: Any, *, inputs: Any) -> tuple[Control, ...]:
    """The controls, budget first. UsageError for unknown ones, and for those that the model has an input for."""
    known = get_args(Control)
    given = list(controls) if isinstance(controls, Iterable) and not isinstance(controls, str) else [controls]
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise UsageError(f"no such control{hint}", found=repr(name), expected=", ".join(known))
    chosen = tuple(name for name in known if name in ("budget", *given))
    if taken := [name for name in chosen if name in inputs]:
        raise UsageError("the model has an input of that name itself", found=taken[0], fix="rename it in its forward")
    return chosen


def example_controls(module: Controlled, *, batch: int | None) -> dict[str, Tensor]:
    """Values of a module's controls that ask for everything; budgets are [batch] unless `batch` is None."""
    budget = torch.ones(()) if batch is None else torch.ones(batch)
    values = {"budget": budget, "cap": torch.ones(()), "k_lo": torch.tensor(0), "k_hi": torch.tensor(module.most)}
    return {name: values[name].to(module.share.device) for name in module.controls}


def _decimal(values: Tensor) -> Tensor:
    """float32 numbers as the float64 nearest to the decimal fraction that they were written as."""
    scale = 10**_DECIMALS
    return (values.double() * scale).round() / scale


def asserted(value: Tensor, holds: Tensor, message: str) -> Tensor:
    """`value`; RuntimeError where `holds` is not true everywhere. On a GPU none, and 1 for nan.

    There the assertion would end all work of the process on that device.
    """
    if value.device.type != "cpu":
        return value.nan_to_num(1.0)
    torch._assert_async(holds.all(), message)
    return value


def _wanted(name: str, low: float, high: float) -> str:
    return f"{name} must be from {low:.4g} to {high:.4g}"
