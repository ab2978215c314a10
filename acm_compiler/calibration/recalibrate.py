"""`acm.recalibrate`, the budget table alone for new data, and `acm.sensitivity`, expected damage by site and k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from tabulate import tabulate
from torch import nn

from acm_compiler.acm.intact import refuse_empty, refuse_skips
from acm_compiler.calibration.answer import run
from acm_compiler.calibration.examples import Examples, MaskOf, masked
from acm_compiler.data.batch import check_tokens
from acm_compiler.errors import NoBudgetTable, NothingRecorded, counted
from acm_compiler.passes.rewrite.conversion import (
    BudgetTable,
    Rewritten,
    conversion,
    gates_digest,
    refuse_compiled,
    wholly_rewritten,
)
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say, progress_of
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.budgets import shares_of
from acm_compiler.runtime.control import is_held, refuse_unfitted, set_budget
from acm_compiler.runtime.measure_budgets import fill_table, undisturbed
from acm_compiler.runtime.usage import PADDING, recorded
from acm_compiler.sources.inputs import Example, Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBudgets(BudgetTable):
    """A budget table with the plan of its model; `str()` is a table of what each measured row spends."""

    plan: Plan = field(repr=False)

    def __str__(self) -> str:
        cost = self.plan.cost
        rows = [
            [f"{point.share:.3f}", f"{cost.model_share(point.share):.1%}", f"{point.knob:+.3g}"]
            for point in self.points
            if point.measured
        ]
        table = tabulate(rows, headers=["budget reached", "share of the model", "knob"], disable_numparse=True)
        missing = "".join(f"\nno knob leads to budgets from {low:.3f} to the next" for low in self.jumps)
        return f"{table}\nmeasured on {counted(self.examples, 'example')}; 1, all learners, needs no knob{missing}"


def recalibrate(
    model: nn.Module,
    batches: Iterable[Inputs],
    *,
    tokens: int = 4_000,
    budgets: Sequence[float | str] = (),
    mask: MaskOf | None = None,
    progress: Say | None = None,
) -> MeasuredBudgets:
    """Measure anew which knob reaches which budget, on `batches`; learners, gates and the lowest k stay as they are.

    Gives the new table, which prints what each of its rows spends.
    batches, mask: as for `calibrate`, read until the busiest site has run on `tokens` real tokens; all of the batches
    are run once per knob tried. A budget that is set holds on, by the new table; a fixed k stays fixed. Raises
    DataError without batches, SitesNotFitted, NoBudgetTable where nothing has trained the gates, TrainingFailed for
    values that are not finite.
    """
    refuse_compiled(model, "calibrated")
    found = wholly_rewritten(model, "calibration")
    refuse_empty(found.acms)
    refuse_skips(found.acms, "recalibration")
    owner, asked = found.owner, shares_of(found.owner, budgets)
    check_tokens(tokens)
    refuse_unfitted(found, "recalibrate")
    if owner.table is None and owner.start_gates == gates_digest(found.acms.values()):
        raise NoBudgetTable(
            "nothing has trained this model's gates: what they choose is chance, and so would be a table of it",
            fix="run acm.calibrate(model, batches), or a recipe's gate phase; acm.set_k(model, k) works without gates",
        )
    k_lo = owner.table.points[0].k_lo if owner.table else 0
    held = {acm: acm.run_time() for acm in found.acms.values() if is_held(acm, owner)}
    with torch.inference_mode(False):
        examples = _enough_of(found, masked(batches, mask), tokens)
        wanted = (*asked, *owner.budgets_set)
        with progress_of("recalibrate", progress) as work:
            table = fill_table(found, examples, budgets=wanted, k_lo=k_lo, progress=work)
    if isinstance(owner.budget, dict):
        phases = {phase: max(budget, owner.table_min) for phase, budget in owner.budget.items()}
        set_budget(model, phases, cap=owner.cap)
    elif owner.budget is not None:
        set_budget(model, max(owner.budget, owner.table_min), cap=owner.cap)
    for acm, choices in held.items():
        acm.set_run_time(choices)
    return MeasuredBudgets(
        rule=table.rule, points=table.points, examples=table.examples, jumps=table.jumps, plan=owner.plan
    )


def _enough_of(found: Rewritten, batches: Iterable[Example], tokens: int) -> list[Example]:
    """The first batches with so many tokens, all of them for measuring."""
    seen: dict[str, int] = {}
    examples = Examples(batches)
    with undisturbed(found):
        for inputs, mask in examples.read(lambda: max(seen.values(), default=0) >= tokens):
            with batch_context(found.model, mask=mask), recorded(found) as usage:
                run(found, inputs)
            for name, k_BS in usage.k.items():
                seen[name] = seen.get(name, 0) + int((k_BS != PADDING).sum())
    return examples.fitted


_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Expected damage by site name and k; `str()` is a table.

    One damage is the squared change of the model's output, over its squared norm, if every token ran k learners at
    that site alone: to first order, on the calibration data. Where that norm is zero, which `calibrate` warns of, it is
    the mean squared change of the site's own output, summed over an example's tokens. What rounding alone does, below
    1e-12, is printed as 0.
    """

    sites: dict[str, dict[int, float]]

    def __str__(self) -> str:
        columns = sorted({k for damages in self.sites.values() for k in damages})
        rows = [
            [name, *(_text(damages[k]) if k in damages else "" for k in columns)]
            for name, damages in self.sites.items()
        ]
        return tabulate(rows, headers=["site", *(f"k = {k}" for k in columns)], disable_numparse=True)


def _text(damage: float) -> str:
    return f"{damage:.1e}" if damage >= _ROUNDING else "0"


def sensitivity(model: nn.Module) -> Sensitivity:
    """The expected damage of every k at every site, as the last `calibrate` found it.

    NothingRecorded for a model that was not calibrated, NotRewritten for one without ACMs.
    """
    owner = conversion(model)
    if not owner.damage:
        raise NothingRecorded("this model was not calibrated", fix="acm.calibrate(model, batches)")
    known = [site for site in owner.plan.sites if site.name in owner.damage]
    return Sensitivity(sites={site.name: dict(enumerate(owner.damage[site.name], start=site.k_min)) for site in known})


def known_damages(model: nn.Module) -> dict[str, dict[int, float]]:
    """The same by site and k as plain data; empty for a model that was not calibrated."""
    return sensitivity(model).sites if conversion(model).damage else {}
