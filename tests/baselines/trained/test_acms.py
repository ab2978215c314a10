"""Ablations of the paper's phases: each differs from them in one thing, with as many steps in all."""

import dataclasses
import shutil

import pytest
import torch

import acm_compiler as acm
from acm_compiler.baselines.choose_methods import METHODS, choose
from acm_compiler.baselines.compare import Options, compare
from acm_compiler.baselines.trained.acms import ABLATIONS, Paper
from acm_compiler.errors import UsageError
from acm_compiler.evaluation.comparison import comparison_table
from acm_compiler.training.schedule import run_schedule
from tests.baselines.test_compare import acmc, small, whole  # noqa: F401

PHASES = ["distill", "gate", "finetune"]


def schedule_of(kind, subject):
    return kind(subject)._schedule((0.2, 0.6))


@pytest.mark.parametrize("steps", [4, 7, 600])
@pytest.mark.parametrize("key", ABLATIONS)
def test_what_is_left_out_is_all_that_differs_and_the_steps_are_as_many(subject, key, steps):
    subject = dataclasses.replace(subject, steps=steps)
    base = {phase.phase: phase for phase in schedule_of(Paper, subject)}
    found = {phase.phase: phase for phase in schedule_of(ABLATIONS[key], subject)}
    assert list(base) == PHASES and list(found) == [phase for phase in PHASES if phase != key]
    assert sum(phase.steps for phase in found.values()) == sum(phase.steps for phase in base.values()) == steps
    for name, phase in found.items():
        changed = {k for k, value in phase if value != getattr(base[name], k)} - {"steps"}
        assert changed == ({key} if name == "finetune" and key in ("budget", "entropy", "diversity") else set())
        assert not changed or getattr(phase, key) == 0


def test_learners_start_as_the_plan_says_or_at_random_where_nothing_has_fitted_them(subject):
    def starts(kind):
        return {(site.kind == "linear", site.init) for site in kind(subject)._plan().sites}

    assert starts(Paper) == {(True, "auto"), (False, "auto")}
    assert starts(ABLATIONS["start"]) == {(True, "random"), (False, "random")}
    assert starts(ABLATIONS["distill"]) == {(True, "random"), (False, "auto")}


def test_numbers_of_learners_are_those_of_all_sites(subject):
    subject = dataclasses.replace(
        subject, replan=lambda n: acm.plan(subject.dense, torch.zeros(1, 3, 12, 12), learners=n)
    )
    for n in (2, 4, 8, 16):
        assert {site.learners for site in ABLATIONS[f"n{n}"](subject)._plan().sites} == {n}


def test_ablations_are_chosen_beside_methods_and_other_names_are_refused(subject):
    def chosen(**named):
        return list(choose(subject.dense, subject.plan, budgets=None, usual=(0.6,), **named).budgets)

    assert chosen(names=["acm_paper"], ablations=["gate", "n8"]) == ["acm_paper", "acm_paper-gate", "acm_paper-n8"]
    assert len(chosen(names=["acm_paper"], ablations=["all"])) == 1 + len(ABLATIONS)
    assert not [name for name in chosen(names=["all"]) if name not in METHODS]
    with pytest.raises(UsageError, match=r"--ablate: unknown ablation \(did you mean 'entropy'\?\)"):
        chosen(names=["acm_paper"], ablations=["entropi"])


@pytest.mark.slow
def test_ablations_are_trained_and_measured_as_methods_are(whole, tmp_path, monkeypatch):  # noqa: F811
    """A phase left out, another number of learners, and a training for each budget."""
    trained = []

    def noting(model, schedule, job, **named):
        trained.append((job.budget, [phase.phase for phase in schedule]))
        return run_schedule(model, schedule, job, **named)

    monkeypatch.setattr("acm_compiler.baselines.trained.acms.run_schedule", noting)
    shutil.copytree(whole[0], tmp_path / "run", ignore=shutil.ignore_patterns("compare*", "report"))
    keys = ("distill", "gate", "n4", "shared")
    options = Options(
        directory=tmp_path / "run", methods=("width",), ablations=keys, budgets=(0.6, 0.75), steps=3, quick=True
    )
    found = compare(small(), options, say=print)
    assert [method.name for method in found.methods] == ["width", *(f"acm_paper-{key}" for key in keys)]
    assert all(abs(row.cost.share - row.budget) < 0.05 for method in found.methods for row in method.rows)
    assert [phases for _, phases in trained] == [PHASES[1:], [PHASES[0], PHASES[2]], *[PHASES] * 3]
    assert trained[0][0] == trained[2][0] == 0.5 and trained[3][0] < 0.5 < trained[4][0]
    assert "ACM by the paper's three phases: 4 learners" in comparison_table(found)
    assert not [path for path in (tmp_path / "run/compare").rglob("state")]


def test_the_verb_refuses_an_unknown_ablation_before_anything_is_written(tmp_path):
    pytest.importorskip("sklearn")
    done = acmc("--out", str(tmp_path / "run"), "--methods", "acm_paper", "--ablate", "entropi")
    assert done.exit_code == 2 and "did you mean 'entropy'?" in done.stderr
    assert not (tmp_path / "run").exists()
