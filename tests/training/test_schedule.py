"""The makers of phases."""

from typing import get_args

from acm_compiler.recipe.phases import Phase, TrainedPhase
from acm_compiler.training.schedule import MAKERS


def test_every_phase_that_takes_steps_has_a_maker_and_advice_if_gates_choose_in_it():
    trained = {kind for kind in get_args(get_args(Phase)[0]) if issubclass(kind, TrainedPhase)}
    assert set(MAKERS) == trained
    assert all(kind.imitates != bool(kind.remedy) for kind in trained)
