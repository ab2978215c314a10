"""Interrupted runs continue at the very batch; what is on disk is always complete."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from acm_compiler.errors import RunInterrupted, StorageError, UsageError
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, conversion, sites
from acm_compiler.recipe.phases import CalibratePhase
from acm_compiler.runtime.measure_budgets import measure_budgets
from acm_compiler.training.live_state import live_facts, restore_live_facts
from acm_compiler.training.schedule import run_schedule
from acm_compiler.training.state import discard_state, has_state
from tests.helpers import ROOT
from tests.helpers.build import acm_for
from tests.helpers.training_process import SCHEDULE, STEPS, Signalling, train, weights
from tests.helpers.training_runs import distill, examples, finetune, fitted, gate, job_in, metrics
from tests.helpers.training_tiny import Task, make_model

pytestmark = pytest.mark.usefixtures("one_thread")
# the fourth batch of each phase: in the middle of its second epoch, one step after a timed save
BATCHES = {name: i * STEPS + 4 for i, name in enumerate(("distill", "gate", "finetune"))}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Weights and metrics of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    model = train(directory)
    return weights(model), metrics(directory)


def same(found, expected):
    return found.keys() == expected.keys() and all(value.equal(expected[name]) for name, value in found.items())


def start(directory, **options):
    """The run in a process of its own."""
    arguments = [f"--{name}={value}" if value is not True else f"--{name}" for name, value in options.items()]
    command = [sys.executable, "-m", "tests.helpers.training_process", str(directory), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})


def end_of(process):
    """The exit status of a process, which is given time on a busy machine."""
    try:
        return process.wait(500)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("phase", BATCHES)
def test_a_run_that_was_asked_to_stop_continues_at_the_very_batch(phase, number, uninterrupted, tmp_path):
    with pytest.raises(RunInterrupted, match=rf"{number.name} after step 4 of 5 of phase {phase}") as caught:
        train(tmp_path, at=BATCHES[phase], number=number)
    assert caught.value.exit_code == 130
    assert "acmc rewrite --resume" in str(caught.value)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [line["step"] for line in metrics(tmp_path)][-1] == 4
    expected, lines = uninterrupted
    assert same(weights(train(tmp_path, resume=True)), expected)
    assert metrics(tmp_path) == lines


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Directories of runs that SIGKILL ended in each phase, two steps after a save at most."""
    runs = {phase: tmp_path_factory.mktemp(phase) for phase in BATCHES}
    processes = {p: start(d, at=BATCHES[p] + 1, signal=int(signal.SIGKILL)) for p, d in runs.items()}
    assert {p: end_of(process) for p, process in processes.items()} == dict.fromkeys(runs, -signal.SIGKILL)
    return runs


@pytest.mark.parametrize("phase", BATCHES)
def test_a_killed_run_continues_from_its_last_save(phase, killed, uninterrupted):
    directory = killed[phase]
    assert [line["step"] for line in metrics(directory)][-1] == 4
    expected, lines = uninterrupted
    assert same(weights(train(directory, resume=True)), expected)
    assert metrics(directory) == lines


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
@pytest.mark.parametrize("at", [1, STEPS, STEPS + 1, 2 * STEPS, 3 * STEPS])
def test_processes_that_stop_where_phases_meet_end_alike(at, number, uninterrupted, tmp_path):
    expected = -signal.SIGKILL if number == signal.SIGKILL else 130
    assert end_of(start(tmp_path, at=at, signal=int(number))) == expected
    assert end_of(start(tmp_path, resume=True)) == 0
    assert same(load_file(tmp_path / "end.safetensors"), uninterrupted[0])
    assert metrics(tmp_path) == uninterrupted[1]


def test_a_second_signal_has_its_usual_effect(tmp_path):
    class Twice(Task):
        def inputs(self, batch):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return super().inputs(batch)

    with pytest.raises(KeyboardInterrupt):
        run_schedule(make_model(), [distill()], job_in(tmp_path, task=Twice()))


def test_a_signal_between_phases_stops_before_the_next(tmp_path):
    def interrupt(model, config, seconds):
        os.kill(os.getpid(), signal.SIGTERM)

    model = make_model()
    with pytest.raises(RunInterrupted, match="SIGTERM after phase distill"):
        run_schedule(model, [distill(), distill()], job_in(tmp_path, on_phase_end=interrupt))
    assert len(metrics(tmp_path)) == 6


def test_one_complete_state_is_kept_and_holds_no_foreign_objects(tmp_path):
    model = make_model()
    run_schedule(model, [distill()], job_in(tmp_path, save_every="1step"))
    (state,) = (tmp_path / "state").iterdir()
    assert state.name == "1-0"
    assert sorted(p.name for p in state.iterdir()) == ["generators.pt", "model.safetensors", "state.json"]
    assert "generators" in torch.load(state / "generators.pt", weights_only=True)
    saved = load_file(state / "model.safetensors")
    assert not [name for name in saved if ".dense." in name]
    assert {"blocks.0.mlp.knob", "blocks.0.mlp.k_lo", "blocks.0.mlp.learners.w_in"} <= set(saved)
    assert has_state(tmp_path)
    discard_state(tmp_path)
    assert not has_state(tmp_path) and not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("at", "until", "message"),
    [
        (BATCHES["gate"], "distill", r"step 4 of gate.*\n  leave out --until, or .*: gate, finetune$"),
        (2 * STEPS, "distill", r"step 5 of gate.*\n.*: gate, finetune$"),
        (BATCHES["finetune"], "gate", r"step 4 of finetune.*\n.*: finetune$"),
    ],
)
def test_a_run_that_is_past_a_phase_cannot_stop_after_it(at, until, message, tmp_path):
    with pytest.raises(RunInterrupted):
        train(tmp_path, at=at)
    files = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=message) as caught:
        train(tmp_path, resume=True, until=until)
    assert f"past the end of phase {until!r}" in str(caught.value)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == files


def test_a_run_that_has_done_a_later_phase_cannot_stop_after_an_earlier_one(tmp_path):
    train(tmp_path, until="gate")
    lines = metrics(tmp_path)
    train(tmp_path, resume=True, until="gate")
    assert metrics(tmp_path) == lines
    with pytest.raises(UsageError, match=r"found a state after gate\).*\n.*: finetune$"):
        train(tmp_path, resume=True, until="distill")
    train(tmp_path, resume=True)
    with pytest.raises(UsageError, match=r"found a state after finetune\)\n  leave out --until$"):
        train(tmp_path, resume=True, until="gate")
    assert len(metrics(tmp_path)) > len(lines)


def test_a_run_that_was_stopped_before_a_finetune_and_is_to_end_there_gets_its_budgets(tmp_path):
    def interrupt(model, config, seconds):
        if config.phase == "gate":
            os.kill(os.getpid(), signal.SIGTERM)

    def measure(model):
        measure_budgets(model, [(examples(8)["x"], None)])

    schedule = [distill(steps=2), gate(steps=2), finetune(steps=2)]
    with pytest.raises(RunInterrupted, match="SIGTERM after phase gate"):
        run_schedule(make_model(), schedule, job_in(tmp_path, measure=measure, on_phase_end=interrupt))
    model = make_model()
    assert run_schedule(model, schedule, job_in(tmp_path, measure=measure), resume=True, until="gate") == 2
    assert conversion(model).table is not None


def test_a_finished_run_has_nothing_left_to_do(uninterrupted, tmp_path):
    first = train(tmp_path)
    again = train(tmp_path, resume=True)
    assert same(weights(again), weights(first))
    assert metrics(tmp_path) == uninterrupted[1]


def test_without_a_saved_state_resuming_is_starting(uninterrupted, tmp_path):
    assert same(weights(train(tmp_path, resume=True)), uninterrupted[0])


def test_starting_over_forgets_the_state_and_the_metrics(tmp_path):
    run_schedule(make_model(), [distill()], job_in(tmp_path))
    run_schedule(make_model(), [distill(steps=2)], job_in(tmp_path))
    assert len(metrics(tmp_path)) == 2


def stopped(directory, **changes):
    """A run that was interrupted in its third step."""
    model = make_model()
    with pytest.raises(RunInterrupted):
        run_schedule(model, SCHEDULE, job_in(directory, task=Signalling(3), **changes))


def test_another_recipe_teacher_or_number_of_processes_is_refused(tmp_path):
    first = {"gate": {"share": 0.01}, "schedule": [{"phase": "distill", "lr": 0.1}]}
    second = {"gate": {"share": 0.01}, "schedule": [{"phase": "distill", "lr": 0.2}]}
    stopped(tmp_path, decisions=first)
    with pytest.raises(
        UsageError, match=r"another recipe \(saved -> now\):\n  schedule\[0\].lr: 0.1 -> 0.2\n  continue"
    ):
        run_schedule(make_model(), SCHEDULE, job_in(tmp_path, decisions=second), resume=True)
    other = make_model()
    conversion(other).teacher = "another-teacher"
    with pytest.raises(UsageError, match="other dense weights"):
        run_schedule(other, SCHEDULE, job_in(tmp_path, decisions=first), resume=True)
    path = next((tmp_path / "state").iterdir()) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))
    with pytest.raises(UsageError, match=r"another number of processes .*found 2, expected 1"):
        run_schedule(make_model(), SCHEDULE, job_in(tmp_path, decisions=first), resume=True)


@pytest.mark.parametrize("name", ["model.safetensors", "optimization.pt", "generators.pt", "state.json"])
def test_a_damaged_state_is_refused(name, tmp_path):
    stopped(tmp_path)
    path = next((tmp_path / "state").iterdir()) / name
    for damage in (lambda: path.write_bytes(path.read_bytes()[:20]), path.unlink):
        damage()
        with pytest.raises(StorageError, match="the saved state is damaged") as caught:
            run_schedule(make_model(), SCHEDULE, job_in(tmp_path), resume=True)
        assert "start over" in str(caught.value)


def test_a_state_that_was_being_removed_when_its_process_was_killed_is_none(tmp_path, monkeypatch):
    stopped(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    discard_state(tmp_path)
    assert any((tmp_path / "state").iterdir()) and not has_state(tmp_path)


def test_a_state_of_another_model_is_refused(tmp_path):
    stopped(tmp_path)
    with pytest.raises(StorageError, match="do not match"):
        run_schedule(make_model(depth=3), SCHEDULE, job_in(tmp_path), resume=True)


def reshape(model, config, examples):
    """A stand-in for calibration: gives MLPs a second layer per k, and the model another plan."""
    inputs, mask = next(examples)
    assert inputs.shape[0] == config.batch == len(mask)
    owner = conversion(model)
    owner.plan = replace(
        owner.plan,
        sites=tuple(replace(s, second_layer="per_k" if s.kind == "mlp" else "shared") for s in owner.plan.sites),
    )
    owner.damage = {site.name: (1.0, 0.5) for site in owner.plan.sites}
    for site in owner.plan.sites:
        shaped = acm_for(site)
        acm = sites(model)[site.name]
        acm.learners, acm.gate = shaped.learners, shaped.gate


def test_a_run_continues_after_a_calibration_that_changed_the_plan(tmp_path):
    schedule = [CalibratePhase(phase="calibrate", batch=8), distill()]
    models = {}
    for name, at in {"whole": 0, "stopped": 4}.items():
        models[name] = make_model()
        job = job_in(tmp_path / name, calibrate=reshape, task=Signalling(at + 1 if at else 0))
        if at:
            with pytest.raises(RunInterrupted, match="step 4 of 6 of phase distill"):
                run_schedule(models[name], schedule, job)
            models[name] = make_model()
            job = job_in(tmp_path / name, calibrate=reshape)
        run_schedule(models[name], schedule, job, resume=bool(at))
    assert same(weights(models["stopped"]), weights(models["whole"]))
    assert conversion(models["stopped"]) == conversion(models["whole"])
    assert conversion(models["whole"]).plan.site("blocks.0.mlp").second_layer == "per_k"


def test_what_a_killed_run_left_half_written_is_ignored(uninterrupted, tmp_path):
    stopped(tmp_path, padded=True)
    unfinished = tmp_path / "state" / ".unfinished"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert same(weights(train(tmp_path, resume=True)), uninterrupted[0])
    assert not unfinished.exists()


def test_a_full_disk_stops_the_run_and_keeps_the_state_before(uninterrupted, tmp_path):
    class Filling(Task):
        """From the third batch on no file may grow beyond 2000 bytes."""

        seen = 0

        def inputs(self, batch):
            self.seen += 1
            if self.seen == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            return super().inputs(batch)

    job = job_in(tmp_path, padded=True, save_every="2steps", task=Filling())
    try:
        with pytest.raises(StorageError) as caught:
            run_schedule(make_model(), SCHEDULE, job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "make room" in str(caught.value) and "--resume" in str(caught.value)
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["0-2"]
    assert same(weights(train(tmp_path, resume=True)), uninterrupted[0])
    assert metrics(tmp_path) == uninterrupted[1]


def test_a_full_disk_before_the_first_state_promises_no_state(tmp_path):
    class Full(Task):
        """From the first batch on no file may grow."""

        def inputs(self, batch):
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
            return super().inputs(batch)

    try:
        with pytest.raises(StorageError) as caught:
            run_schedule(make_model(), SCHEDULE, job_in(tmp_path, padded=True, save_every="1steps", task=Full()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "no state had been saved" in str(caught.value) and "--resume" not in str(caught.value)
    assert not has_state(tmp_path)
    (tmp_path / "state" / "1-0").mkdir(parents=True)
    assert not has_state(tmp_path)


def test_a_place_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    model = make_model()
    before = weights(model)
    with pytest.raises(StorageError, match="metrics cannot be written"):
        run_schedule(model, SCHEDULE, job_in(tmp_path / "file" / "out"))
    assert same(weights(model), before)


def test_states_rules_and_budgets_survive(tmp_path):
    model, other = make_model(), make_model()
    first = next(iter(sites(model).values()))
    first.state, first.gate.rule = "learners", "damage"
    owner = conversion(model)
    owner.table = BudgetTable(rule="damage", points=(BudgetPoint(share=0.25, knob=-1.5, k_lo=1),), examples=7)
    owner.budget, owner.default_budget = 0.4, 0.6
    restore_live_facts(other, json.loads(json.dumps(live_facts(model))))
    assert conversion(other) == conversion(model)
    assert live_facts(other) == live_facts(model)


def test_measuring_budgets_is_stopped_at_once_and_starts_over(tmp_path):
    def interrupt(model):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            torch.ones(1).add_(1)
        pytest.fail("the signal was put off")

    with pytest.raises(RunInterrupted, match=r"measuring budgets after phase gate[\s\S]*acmc rewrite --resume"):
        run_schedule(fitted(make_model()), [gate()], job_in(tmp_path, measure=interrupt))
    lines, model, measured = metrics(tmp_path), fitted(make_model()), []
    run_schedule(model, [gate()], job_in(tmp_path, measure=measured.append), resume=True)
    straight = fitted(make_model())
    run_schedule(straight, [gate()], job_in(tmp_path / "straight", measure=measured.append))
    assert measured == [model, straight] and metrics(tmp_path) == lines
    assert same(weights(model), weights(straight))


def test_a_calibration_is_stopped_at_once_and_starts_over(tmp_path):
    def calibrate(model, phase, examples):
        next(examples)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on")

    before = signal.getsignal(signal.SIGINT)
    schedule = [distill(), CalibratePhase(phase="calibrate", batch=4)]
    with pytest.raises(RunInterrupted, match=r"inside phase calibrate[\s\S]*acmc rewrite --resume"):
        run_schedule(make_model(), schedule, job_in(tmp_path, calibrate=calibrate))
    assert signal.getsignal(signal.SIGINT) is before
    done = []
    job = job_in(tmp_path, calibrate=lambda model, phase, examples: done.append(len(list(examples))))
    run_schedule(make_model(), schedule, job, resume=True)
    assert done == [12]
    assert [line["phase"] for line in metrics(tmp_path)] == ["distill"] * 6 + ["calibrate"], "distill once, a line each"
