"""model.json and budgets.json as `acm.save` writes them, and the choices among them: budget, cap, every site's k.

What else the files say is refused by its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from acm_compiler.acm import ACM
from acm_compiler.acm.module import RUN_TIME
from acm_compiler.acm.quantized.integers import To
from acm_compiler.acm.reference import GateRule
from acm_compiler.acm.sparse import ValueSizes
from acm_compiler.errors import StorageError
from acm_compiler.passes.rewrite.conversion import (
    BudgetPoint,
    Conversion,
    EvaluatedBudget,
    Rewritten,
    plain_facts,
    restore_facts,
)
from acm_compiler.planning.plan import Plan
from acm_compiler.recipe.messages import checked_json, wrong_entry
from acm_compiler.runtime.control import PHASES, set_budget
from acm_compiler.runtime.site_status import status
from acm_compiler.site import Share, Whole

FORMAT, QUANTIZED_FORMAT, REST_FORMAT, INT4_FORMAT = FORMATS = 1, 2, 3, 4
"""The formats of models of floats, with int8 learners, with other int8 linears, and with 4-bit weights, each refused by
older versions."""
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
    quantized: To | None = None
    quantized_rest: tuple[str, ...] = ()
    choices: _Choices | None = None
    phase_budgets: dict[_Phase, Share] | None = None
    damage: dict[str, tuple[float, ...]]
    value_sizes: dict[str, ValueSizes] = {}
    rules: dict[str, GateRule]
    table: _Table | None
    budgets: tuple[EvaluatedBudget, ...] = ()


def check_description(text: str, where: str) -> None:
    """Raise StorageError unless `text` is a model.json of today's format."""
    checked_json(Description, text, what="this is not a description of a saved model", where=where, fix=_FIX)


def check_budgets(text: str, plan: Plan, where: str) -> None:
    """Raise StorageError unless `text` is the budgets.json of a model of this plan."""
    what = "the budgets cannot be used"
    read: Budgets = checked_json(Budgets, text, what=what, where=where, fix=_FIX)
    sites = {site.name: site for site in plan.sites}
    chosen = {} if read.choices is None else read.choices.sites
    named: dict[str, Iterable[str]] = {"rules": read.rules, "damage": read.damage, "choices.sites": chosen}
    for key, names in {**named, "value_sizes": read.value_sizes}.items():
        for name in names:
            if name not in sites:
                raise wrong_entry(key, name, "the name of a site", what=what, where=where, fix=_FIX)
    for name, phases in chosen.items():
        if len(phases) != 2:
            expected = "both phases, prefill and decode"
            raise wrong_entry(f"choices.sites.{name}", list(phases), expected, what=what, where=where, fix=_FIX)


def format_of(owner: Conversion) -> int:
    """The format that a model is saved in."""
    if owner.quantized == "int4":
        return INT4_FORMAT
    if owner.rest:
        return REST_FORMAT
    return FORMAT if owner.quantized is None else QUANTIZED_FORMAT


def budgets_document(found: Rewritten) -> dict[str, Any]:
    """budgets.json of a model: what the plan says too is left out, and each budget evaluated has a place of its own."""
    owner, facts = found.owner, plain_facts(found)
    table = facts["table"]
    return {
        "format": format_of(owner),
        "teacher": owner.teacher,
        "start_gates": owner.start_gates,
        "default_budget": facts["default_budget"],
        **({"quantized": owner.quantized} if owner.quantized else {}),
        **({"quantized_rest": owner.rest} if owner.rest else {}),
        "choices": collect_choices(found),
        "damage": facts["damage"],
        **({"value_sizes": facts["value_sizes"]} if facts["value_sizes"] else {}),
        "rules": {name: site["rule"] for name, site in facts["sites"].items()},
        "table": table and {**table, "evaluated": ()},
        "budgets": table["evaluated"] if table else (),
    }


def restore_document(owner: Conversion, acms: Mapping[str, ACM], document: Mapping[str, Any]) -> None:
    """Write what `budgets_document` gave, but for the choices, into a model's conversion and ACMs."""
    table = document["table"]
    sites = {
        name: {"state": acm.state, "rule": document["rules"].get(name, acm.gate.rule)} for name, acm in acms.items()
    }
    measured = table and {**table, "evaluated": document.get("budgets", ())}
    restore_facts(owner, acms, {**document, "sites": sites, "table": measured})
    owner.teacher, owner.quantized = document["teacher"], document.get("quantized")
    owner.rest = tuple(document.get("quantized_rest", ()))
    owner.start_gates = document.get("start_gates")  # not known to folders that were written before there was one


def collect_choices(found: Rewritten) -> dict[str, Any] | None:
    """`{"budget", "cap", "sites": {name: {phase: [knob, k_lo, k_hi]}}}`; None where nothing was set: every k is N."""
    if _nothing_set(found):
        return None
    sites = {name: _by_phase(acm) for name, acm in found.acms.items()}
    return {"budget": found.owner.budget, "cap": found.owner.cap, "sites": sites}


def restore_choices(found: Rewritten, choices: dict[str, Any] | None, *, where: Path) -> None:
    """Set again what `collect_choices` gave, else the recipe's own budget, if the model has one."""
    owner, acms = found.owner, found.acms
    if choices is None:
        if owner.table is not None and owner.default_budget is not None:
            set_budget(found.model, None)
        return
    if choices["sites"].keys() != acms.keys():
        odd = min(choices["sites"].keys() ^ acms.keys())
        raise StorageError("the choices are of a model with other sites", where=str(where), found=odd, fix=_FIX)
    for name, acm in acms.items():
        for phase in PHASES:
            knob, k_lo, k_hi = choices["sites"][name][phase]
            acm.set_choices(knob=knob, k_lo=k_lo, k_hi=k_hi, phase=phase)
    owner.budget, owner.cap = choices["budget"], choices["cap"]


def choices_in_words(found: Rewritten) -> str:
    """The choices that a loaded model runs until something else is set, as text."""
    return "no budget was set, every token runs all learners" if _nothing_set(found) else status(found.model).choice


def _nothing_set(found: Rewritten) -> bool:
    """True where no budget was set and every token runs all learners."""
    lowest = [(acm.written[name], acm.count) for acm in found.acms.values() for name in RUN_TIME if "k_lo" in name]
    return found.owner.budget is None and all(k_lo == count for k_lo, count in lowest)


def _by_phase(acm: ACM) -> dict[str, list[float]]:
    values = [acm.written[name] for name in RUN_TIME]
    knobs = torch.tensor([values[0], values[3]], dtype=torch.int32, device="cpu").view(torch.float32).tolist()
    return dict(zip(PHASES, ([knobs[0], *values[1:3]], [knobs[1], *values[4:]]), strict=True))
