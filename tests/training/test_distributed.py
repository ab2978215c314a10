"""Two processes under torchrun or `accelerate launch` end where one process with the same batches ends."""

import logging

import pytest
import torch
from safetensors.torch import load_file

from acm_compiler.training.machine import open_machine
from tests.helpers.launch import launch, run_all
from tests.helpers.training_process import weights
from tests.helpers.training_ranks import CONFIGS, SHARES, SPLIT, share_gradient, train_each
from tests.helpers.training_runs import metrics

RANKS = "tests.helpers.training_ranks"
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
ACCELERATE += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of two processes and of one, and where they wrote their metrics."""
    two, one = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    ranks = launch(RANKS, two)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = {name: weights(model) for name, model in train_each(one).items()}
    torch.set_num_threads(threads)
    return {"ranks": ranks, "alone": alone, "two": two, "one": one}


@pytest.mark.parametrize("phase", CONFIGS)
def test_two_processes_equal_one(phase, runs):
    for name, expected in runs["alone"][phase].items():
        found = [rank[f"{phase}/{name}"] for rank in runs["ranks"]]
        assert found[0].equal(found[1]), name
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("phase", CONFIGS)
def test_the_metrics_of_two_processes_are_those_of_one(phase, runs):
    found, expected = metrics(runs["two"] / phase), metrics(runs["one"] / phase)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.pop("phase") == b.pop("phase")
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


RECIPE = """acm: 1
name: unequal
model: {source: python, name: "tests.helpers.unequal_texts:model", weights: null}
task: {kind: "python:tests.helpers.unequal_texts:task"}
data:
  train: {kind: "python:tests.helpers.unequal_texts:data", args: {count: 200}}
  eval: {kind: "python:tests.helpers.unequal_texts:data", args: {count: 16, seed: 1}}
sites:
  - {match: mlp, learners: 4}
  - {match: attn, learners: 4, form: svd}
budgets: {train: 0.5, report: [0.5, 1.0]}
schedule:
  - {phase: calibrate, tokens: 1500, batch: 16, local_steps: 4}
  - {phase: finetune, steps: 4, batch: 16, accumulate: 2, lr: 1.0e-3, budget_range: [0.3, 0.9]}
  - {phase: distill, steps: 4, batch: 16, accumulate: 2, lr: 1.0e-3}
  - {phase: gate, steps: 4, batch: 16, lr: 1.0e-2}
  - {phase: finetune, steps: 4, batch: 16, lr: 1.0e-3, objective: distillation}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe, and what one process makes of it."""
    directory = tmp_path_factory.mktemp("recipe")
    path = directory / "recipe.yaml"
    path.write_text(RECIPE)
    run_all("acm_compiler", "rewrite", "--recipe", str(path), "--out", str(directory / "one"), processes=1)
    return path, load_file(directory / "one/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["false", "true"])
@pytest.mark.parametrize("processes", [2, 4])
def test_a_whole_recipe_ends_as_in_one_process(processes, sharded, recipe, tmp_path):
    path, expected = recipe
    words = ["rewrite", "--recipe", str(path), "--out", str(tmp_path / "out"), "--set", f"run.sharded={sharded}"]
    run_all("acm_compiler", *words, processes=processes)
    # float64, but for gates, which calibrate fits in float32
    torch.testing.assert_close(load_file(tmp_path / "out/model.safetensors"), expected, rtol=1e-6, atol=1e-6)


def test_shares_are_gathered_with_their_gradients(runs):
    gradients = [rank["gradient"] for rank in runs["ranks"]]
    assert [len(g) for g in gradients] == list(SPLIT)
    # each process's loss is the whole one; DDP's mean over processes makes the sum of both the gradient of one
    torch.testing.assert_close(torch.cat(gradients) / 2, share_gradient(torch.tensor(SHARES)))


def test_accelerate_launches_the_same_run(runs, tmp_path):
    pytest.importorskip("accelerate")
    for found, expected in zip(launch(RANKS, tmp_path, "finetune", launcher=ACCELERATE), runs["ranks"], strict=True):
        for name, tensor in found.items():
            assert tensor.equal(expected[name]), name


def test_several_processes_that_did_not_start_are_noticed(monkeypatch, caplog):
    # what `accelerate launch --num_processes 2` leaves in the environment of the one process it starts on a CPU
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with caplog.at_level(logging.WARNING):
        open_machine()
    assert "asked for several processes and started one" in caplog.text


def test_an_accelerator_of_the_users_with_other_settings_is_in_nobodys_way():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state()
    accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    try:
        machine = open_machine()
    finally:
        accelerate.state.AcceleratorState._reset_state()
    assert (machine.rank, machine.world, machine.dtype) == (0, 1, None)
