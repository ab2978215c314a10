"""model.json and budgets.json as `acm.save` writes them; what else they say is refused by its key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from acm_compiler.acm.reference import GateRule
from acm_compiler.passes.rewrite.conversion import BudgetPoint, EvaluatedBudget
from acm_compiler.planning.plan import Plan
from acm_compiler.recipe.checked_json import checked_json, wrong_entry
from acm_compiler.site import Share, Whole

_FIX = "copy the folder again from where it is whole, or save the model again"
_Phase = Literal["prefill", "decode"]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: int


class Description(_Document):
    """model.json: how the base model is built, and which files are of this save."""

    cls: str = Field(alias="class")
    source: dict[str, Any] | None
    graph: str | None
    versions: dict[str, str]
    save: str
    digests: dict[str, str]
    files: tuple[str, ...] = ()  # not known to folders that were written before there were any


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    rule: GateRule
    points: Annotated[tuple[BudgetPoint, ...], Field(min_length=1)]
    examples: Whole
    evaluated: tuple[EvaluatedBudget, ...] = ()
    jumps: tuple[float, ...] = ()


class _Choices(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    budget: Share | dict[_Phase, Share] | None
    cap: Share | None
    sites: dict[str, dict[_Phase, tuple[float, Whole, Whole]]]


class Budgets(_Document):
    """budgets.json: the state of a conversion that is not tensors."""

    teacher: str | None
    start_gates: str | None = None
    default_budget: Share | None
    choices: _Choices | None = None
    phase_budgets: dict[_Phase, Share] | None = None
    damage: dict[str, tuple[float, ...]]
    rules: dict[str, GateRule]
    table: _Table | None
    budgets: tuple[EvaluatedBudget, ...] = ()


def check_description(text: str, where: str) -> None:
    """Raise StorageError unless `text` is a model.json of today's format."""
    checked_json(Description, text, what="this is no description of a saved model", where=where, fix=_FIX)


def check_budgets(text: str, plan: Plan, where: str) -> None:
    """Raise StorageError unless `text` is the budgets.json of a model of this plan."""
    what = "the budgets cannot be used"
    read: Budgets = checked_json(Budgets, text, what=what, where=where, fix=_FIX)
    sites = {site.name: site for site in plan.sites}
    chosen = {} if read.choices is None else read.choices.sites
    for key, entries in (("rules", read.rules), ("damage", read.damage), ("choices.sites", chosen)):
        for name in entries:
            if name not in sites:
                raise wrong_entry(key, name, "the name of a site", what=what, where=where, fix=_FIX)
    for name, phases in chosen.items():
        if len(phases) != 2:
            expected = "both phases, prefill and decode"
            raise wrong_entry(f"choices.sites.{name}", list(phases), expected, what=what, where=where, fix=_FIX)
