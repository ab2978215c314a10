"""A training that was stopped goes on at the step where it was cut, to the weights of one that never was."""

import dataclasses
import os
import signal

import pytest
import torch

from acm_compiler.baselines.choose_methods import METHODS
from acm_compiler.baselines.trained import experts, train
from acm_compiler.baselines.trained.train import state_path
from acm_compiler.errors import RunInterrupted, StorageError
from acm_compiler.recipe.fields import Every
from acm_compiler.recipe.schema import RunConfig
from acm_compiler.training.loop import Optimization

BUDGETS, STEPS = (0.6, 0.8), 6


@pytest.fixture
def placed(subject, tmp_path, monkeypatch):
    """The subject with a folder of its own for each name that is given."""
    monkeypatch.setattr(experts, "_ROUTER_STEPS", 3)

    def at(place, **run):
        def job(name):
            made, settings = subject.job(name), RunConfig(seed=1, **run)
            return dataclasses.replace(
                made, directory=tmp_path / place, run=settings, resume_command="acmc compare the same"
            )

        return dataclasses.replace(subject, steps=STEPS, job=job)

    return at


def fit(name, subject, budgets=BUDGETS):
    torch.manual_seed(0)
    method = METHODS[name](subject)
    method.convert(budgets, print)
    return method


def outputs(method):
    batch = next(iter(method.subject.held_out()))
    return [torch.stack(method.run(batch, budget)) for budget in BUDGETS]


@pytest.fixture
def steps(monkeypatch):
    """The number of each optimizer step that is taken, in order; `stop_at` sends Ctrl-C in the one of this count."""
    taken, step = [], Optimization.step

    def counted(optimization, number):
        taken.append(number)
        if len(taken) == stop["at"]:
            os.kill(os.getpid(), signal.SIGINT)
        return step(optimization, number)

    stop = {"at": 0}
    monkeypatch.setattr(Optimization, "step", counted)
    return taken, stop


@pytest.mark.parametrize(
    ("name", "cut", "after"),
    [("thin", 9, "step 3 of 6 of thin at 80%"), ("avit", 2, "2 of 6"), ("moefication", 4, "4 of 6")],
)
def test_ctrl_c_saves_the_step_and_the_same_command_goes_on_from_it_to_the_same_outputs(
    placed, steps, name, cut, after
):
    taken, stop = steps
    wanted = outputs(fit(name, placed("whole")))
    whole, before = list(taken), signal.getsignal(signal.SIGINT)
    taken.clear()
    stop["at"] = cut
    with pytest.raises(RunInterrupted, match=rf"stopped by SIGINT after .*{after}.*[^$]*acmc compare the same"):
        fit(name, placed("cut"))
    assert signal.getsignal(signal.SIGINT) is before
    found = outputs(fit(name, placed("cut")))
    assert taken == whole
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    fit(name, placed("cut"))
    assert taken == whole  # what is finished is kept until the method is measured


def test_a_killed_training_goes_on_from_its_last_interval(placed, steps, monkeypatch):
    taken, _ = steps
    wanted = outputs(fit("ztw", placed("whole")))
    taken.clear()
    run = {"save_every": Every(amount=2, unit="step")}

    def die(keeping, done, **given):
        after(keeping, done, **given)
        if done == 5:
            raise KeyboardInterrupt

    after = train._Keeping.after
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train._Keeping, "after", die)
        fit("ztw", placed("killed", **run))
    found = outputs(fit("ztw", placed("killed", **run)))
    assert taken == [0, 1, 2, 3, 4, 4, 5]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_another_training_starts_over_and_a_damaged_state_is_refused(placed, steps):
    taken, _ = steps
    here = placed("run")
    fit("ztw", here)
    fit("ztw", dataclasses.replace(here, steps=STEPS + 1))
    assert taken == [*range(STEPS), *range(STEPS + 1)]
    path = state_path(here.job("ztw").directory, "ztw")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StorageError, match=r"ztw.pt: the state of a training is damaged[^$]*starts over"):
        fit("ztw", here)
