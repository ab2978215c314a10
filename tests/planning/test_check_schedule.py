"""Phases that may not follow each other are refused before the first of them has taken its minutes."""

import dataclasses

import pytest

from acm_compiler.errors import AcmError
from acm_compiler.planning.check_schedule import check_schedule
from acm_compiler.recipe.phases import CalibratePhase
from acm_compiler.site import Pair
from tests.helpers.training_runs import distill, finetune, gate
from tests.helpers.training_tiny import tiny_site

PROJ, MLP = tiny_site("proj", "linear"), tiny_site("mlp", "mlp")
PAIRED = dataclasses.replace(PROJ, pair=Pair(partner="other", heads=2))
CALIBRATE = CalibratePhase(phase="calibrate")
LEARNERS = {"update": "learners", "objective": "distillation"}


def site(base=PROJ, **changes):
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("schedule", "sites"),
    [
        ([distill(), gate(), finetune()], [PROJ, MLP]),
        ([distill(), finetune()], [PROJ, MLP]),
        ([CALIBRATE, finetune(budget_range=(0.2, 0.6))], [PAIRED, MLP]),
        ([CALIBRATE, finetune(**LEARNERS)], [site(PAIRED, form="slices")]),
        ([CALIBRATE, distill(), finetune(**LEARNERS)], [site(PAIRED, form="slices"), MLP]),
        ([CALIBRATE, gate(), finetune()], [site(PAIRED, form="svd"), MLP]),
        ([finetune(), finetune(**LEARNERS)], [site(state="learners")]),
        ([gate()], [site(MLP, state="learners", init="random")]),
        ([CALIBRATE, CALIBRATE], [PAIRED]),
    ],
)
def test_what_works_is_let_through(schedule, sites):
    check_schedule(schedule, sites)


@pytest.mark.parametrize(
    ("schedule", "sites", "message"),
    [
        ([gate()], [PROJ], r"schedule\[0\], gate: .* 1 site still runs its dense region"),
        ([finetune(), CALIBRATE], [MLP], r"schedule\[0\], finetune: .*\n.*calibrate or a distill phase before"),
        ([distill(), finetune(budget_range=(0.2, 0.6))], [PROJ], "budget_range and update: learners need gates"),
        ([distill(), finetune(update="learners")], [PROJ], "calibrate or a gate phase before"),
        ([CALIBRATE, gate()], [PAIRED], r"schedule\[1\], gate: 1 site will or may become"),
        ([CALIBRATE, gate()], [site(PAIRED, form="slices")], "form: svd"),
        ([CALIBRATE, distill()], [site(PAIRED, form="slices")], r"schedule\[1\], distill: all sites are slices"),
        ([distill(), CALIBRATE], [site(PAIRED, form="slices"), MLP], "which calibrate alone can fit"),
        ([distill(), CALIBRATE], [site(learner_act="gelu", init="random", state="learners")], "no closed form"),
        ([distill(), CALIBRATE], [site(layout=None)], "budgets cannot be measured"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(schedule, sites, message):
    with pytest.raises(AcmError, match=message):
        check_schedule(schedule, sites)


def test_a_model_that_was_measured_before_needs_no_phase_for_it():
    check_schedule([finetune(**LEARNERS)], [site(state="learners")], measured=True)
