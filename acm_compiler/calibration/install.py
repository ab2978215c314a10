"""Put fitted learners and gates into a model: all of them, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from acm_compiler.acm import ACM, Gate, Learners
from acm_compiler.acm.module import State
from acm_compiler.calibration.choose_gates import ScoredGate
from acm_compiler.passes.rewrite.build_acm import make_like
from acm_compiler.passes.rewrite.conversion import Conversion, Rewritten
from acm_compiler.planning.cost import learner_unit, macs_per_learner
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.runtime import ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSite:
    """Learners fitted to one site, and two gates: of damage as it is and with evened weights of tokens.

    damage: expected damage of every k from k_min to N, see `Sensitivity`.
    """

    site: PlannedSite
    learners: Learners
    gates: tuple[ScoredGate, ...]
    damage: tuple[float, ...]


def install(found: Rewritten, fitted: Sequence[FittedSite], undo: ExitStack) -> None:
    """Give every ACM its new learners and the first of its gates, and the model its resolved plan; `undo` takes all of
    it back.
    """
    owner = found.owner
    ranks.from_first(fit.learners for fit in fitted)
    for fit in fitted:
        acm = found.acms[fit.site.name]
        make_like(fit.learners, acm.learners)
        for scored in fit.gates:
            make_like(scored.gate, acm.gate)
    undo.callback(_restore_conversion, owner, dataclasses.replace(owner))
    # forms differ a little in what a learner costs
    unit = learner_unit(tuple(fit.site for fit in fitted))
    for fit in fitted:
        acm = found.acms[fit.site.name]
        undo.callback(acm.set_run_time, acm.run_time())
        undo.callback(_put, acm, acm.learners, acm.gate, acm.state, acm.cost)
        _put(acm, fit.learners, fit.gates[0].gate, "learners", macs_per_learner(fit.site) / unit)
    owner.plan = dataclasses.replace(owner.plan, sites=tuple(fit.site for fit in fitted))
    owner.damage = {fit.site.name: fit.damage for fit in fitted}
    owner.table = None


def _put(acm: ACM, learners: Learners, gate: Gate, state: State, cost: float) -> None:
    acm.learners, acm.gate, acm.state, acm.cost = learners, gate, state, cost


def _restore_conversion(owner: Conversion, before: Conversion) -> None:
    for field in dataclasses.fields(Conversion):
        setattr(owner, field.name, getattr(before, field.name))
