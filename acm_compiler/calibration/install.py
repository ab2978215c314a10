"""Putting fitted learners and gates into a model, all or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor, nn

from acm_compiler.acm import ACM, Gate, Learners
from acm_compiler.acm.module import State
from acm_compiler.passes.rewrite.build_acm import mark_initialized
from acm_compiler.passes.rewrite.conversion import Conversion, conversion, sites
from acm_compiler.planning.cost import learner_unit, macs_per_learner
from acm_compiler.planning.plan import PlannedSite


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSite:
    """What calibration made for one site.

    damage: expected damage of every k from k_min to N, see `Sensitivity`. scores: the gate's, of some tokens, [T, C].
    """

    site: PlannedSite
    learners: Learners
    gate: Gate
    damage: tuple[float, ...]
    scores: Tensor


def install(model: nn.Module, fitted: Sequence[FittedSite], undo: ExitStack) -> None:
    """Give every ACM its new learners and gate, and the model its resolved plan; `undo` takes all of it back."""
    acms, owner = sites(model), conversion(model)
    unit = learner_unit(tuple(fit.site for fit in fitted))
    undo.callback(_restore_conversion, owner, dataclasses.replace(owner))
    for fit in fitted:
        acm = acms[fit.site.name]
        undo.callback(acm.set_run_time, acm.run_time())
        undo.callback(_put, acm, acm.learners, acm.gate, acm.state, acm.cost)
        for part, before in ((fit.learners, acm.learners), (fit.gate, acm.gate)):
            part.train(acm.training)
            part.requires_grad_(any(parameter.requires_grad for parameter in before.parameters()))
            mark_initialized(part)
        # forms differ a little in what a learner costs
        _put(acm, fit.learners, fit.gate, "learners", macs_per_learner(fit.site) / unit)
    owner.plan = dataclasses.replace(owner.plan, sites=tuple(fit.site for fit in fitted))
    owner.damage = {fit.site.name: fit.damage for fit in fitted}
    owner.table = None


def _put(acm: ACM, learners: Learners, gate: Gate, state: State, cost: float) -> None:
    acm.learners, acm.gate, acm.state, acm.cost = learners, gate, state, cost


def _restore_conversion(owner: Conversion, before: Conversion) -> None:
    for field in dataclasses.fields(Conversion):
        setattr(owner, field.name, getattr(before, field.name))
