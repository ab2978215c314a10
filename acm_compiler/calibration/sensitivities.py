"""`acm.sensitivity`: which sites matter, by the damage that calibration expects of them."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate
from torch import nn

from acm_compiler.errors import NothingRecorded
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.planning.plan import Plan

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
    return Sensitivity(sites=_by_k(owner.plan, owner.damage))


def known_damages(model: nn.Module) -> dict[str, dict[int, float]]:
    """The same by site and k as plain data; empty for a model that was not calibrated."""
    return sensitivity(model).sites if conversion(model).damage else {}


def _by_k(plan: Plan, damage: dict[str, tuple[float, ...]]) -> dict[str, dict[int, float]]:
    return {
        site.name: dict(enumerate(damage[site.name], start=site.k_min)) for site in plan.sites if site.name in damage
    }
