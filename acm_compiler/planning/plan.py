"""The plan: every decision about a model's sites, frozen and free of tensors.

It is the only object that crosses every border of the compiler, and it survives a JSON round trip.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from acm_compiler.errors import PlanMismatch
from acm_compiler.planning.cost import CostReport, site_cost
from acm_compiler.planning.decisions import SCHEMA, ModelFacts, PlannedSite
from acm_compiler.site import Skip

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions for one model. `print(plan)` is the cost report; change a plan by `dataclasses.replace`.

    `skipped` are the look-alikes that could not be sites; `kept` is everything that does MACs outside the sites.
    `notes` are sentences on what was asked for and could not be, and on outputs that change.
    """

    model: ModelFacts
    sites: tuple[PlannedSite, ...]
    skipped: tuple[Skip, ...] = ()
    kept: tuple[Skip, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cost(self) -> CostReport:
        """The plan's `CostReport`."""
        return CostReport(plan=self, sites=tuple(site_cost(site) for site in self.sites))

    @property
    def budget_range(self) -> tuple[float, float]:
        """The smallest and the largest share of learner MACs that this plan can run."""
        return self.cost.budget_min, 1.0

    def site(self, name: str) -> PlannedSite:
        """The site called `name`; KeyError when there is none."""
        return {site.name: site for site in self.sites}[name]

    def __str__(self) -> str:
        return str(self.cost)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.as_json(), indent=1)

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON document; sites carry their costs, which `from_json` derives anew."""
        cost = self.cost
        return {
            "schema": SCHEMA,
            # `class` is a word of Python's, so no name of a field
            "model": {"class" if name == "cls" else name: value for name, value in asdict(self.model).items()},
            "totals": cost.totals(),
            "budget_range": list(self.budget_range),
            "sites": [asdict(site) | asdict(own) for site, own in zip(self.sites, cost.sites, strict=True)],
            "skipped": [asdict(skip) for skip in self.skipped],
            "kept": [asdict(skip) for skip in self.kept],
            "notes": list(self.notes),
        }

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; StorageError, naming the key, for values that do not fit."""
        from acm_compiler.planning.read_plan import check_derived, read_plan  # pydantic reads plans alone

        plan = Plan(**read_plan(text))
        check_derived(text, plan.as_json())
        return plan


def class_of(model: nn.Module) -> str:
    """The full name of the model's class, as plans and saved models give it."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def fingerprint(model: nn.Module, cls: str | None = None) -> str:
    """A digest of the model's parameters' names and shapes, never of values, dtypes or devices, and of `cls`.

    `cls` None: the name of the model's own class; a plan's digest has the name that the class had then.
    """
    lines = [cls or class_of(model)]
    lines += [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters(remove_duplicate=False)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def fits(plan: Plan, model: nn.Module) -> bool:
    """True if `model` has the parameters, by name and shape, of the model that `plan` was made for."""
    return fingerprint(model, plan.model.cls) == plan.model.fingerprint


def check_fits(plan: Plan, model: nn.Module) -> None:
    """Raise PlanMismatch unless `plan` was made for a model of these parameters."""
    if not fits(plan, model):
        raise PlanMismatch(
            f"the plan was made for a {plan.model.cls} with other parameters than this {class_of(model)}",
            fix="plan again: acm.plan(model, example_inputs)",
        )


def warn_of_class(plan: Plan, model: nn.Module) -> None:
    """Log that `model`, which fits `plan`, is of a class with another name than the one the plan was made for."""
    if class_of(model) != plan.model.cls:
        _LOG.warning(
            "this model is a %s and the plan was made for a %s: the parameters are the same, so the class is taken "
            "to be the same, renamed or moved",
            class_of(model),
            plan.model.cls,
        )
