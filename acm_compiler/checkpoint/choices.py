"""What was set on a model as plain values: its budget, its cap, and the choices of every site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.acm.module import RUN_TIME
from acm_compiler.errors import StorageError
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.runtime.control import PHASES, set_budget
from acm_compiler.runtime.site_status import status


def collect_choices(model: nn.Module) -> dict[str, Any] | None:
    """`{"budget", "cap", "sites": {name: {phase: [knob, k_lo, k_hi]}}}`; None where nothing was set: every k is N."""
    owner, acms = conversion(model), sites(model)
    if owner.budget is None and all(_runs_all(acm) for acm in acms.values()):
        return None
    return {"budget": owner.budget, "cap": owner.cap, "sites": {name: _by_phase(acm) for name, acm in acms.items()}}


def restore_choices(model: nn.Module, choices: dict[str, Any] | None, *, where: Path) -> None:
    """Set again what `collect_choices` gave, else the recipe's own budget, if the model has one."""
    owner, acms = conversion(model), sites(model)
    if choices is None:
        if owner.table is not None and owner.default_budget is not None:
            set_budget(model, None)
        return
    if choices["sites"].keys() != acms.keys():
        odd = min(choices["sites"].keys() ^ acms.keys())
        raise StorageError("the choices are of a model with other sites", where=str(where), found=odd)
    for name, acm in acms.items():
        for phase in PHASES:
            knob, k_lo, k_hi = choices["sites"][name][phase]
            acm.set_choices(knob=knob, k_lo=k_lo, k_hi=k_hi, phase=phase)
    owner.budget, owner.cap = choices["budget"], choices["cap"]


def choices_in_words(model: nn.Module) -> str:
    """What a loaded model runs until something else is set."""
    if conversion(model).budget is None and all(_runs_all(acm) for acm in sites(model).values()):
        return "no budget was set, every token runs all learners"
    return status(model).choice


def _runs_all(acm: ACM) -> bool:
    return all(acm.written[name] == acm.count for name in RUN_TIME if name.endswith("k_lo"))


def _by_phase(acm: ACM) -> dict[str, list[float]]:
    values = [acm.written[name] for name in RUN_TIME]
    knobs = torch.tensor([values[0], values[3]], dtype=torch.int32).view(torch.float32).tolist()
    return dict(zip(PHASES, ([knobs[0], *values[1:3]], [knobs[1], *values[4:]]), strict=True))
