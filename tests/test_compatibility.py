"""Folders that earlier versions wrote: models load with the same outputs, interrupted runs are carried on.

Each folder of tests/compatibility was written by `python -m tests.compatibility.write` of that commit and stays.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import acm_compiler as acm
from acm_compiler.recipe import load_recipe
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.run_recipe import run_recipe
from tests.compatibility.model import examples, model

FOLDER = Path(__file__).parent / "compatibility"
COMMITS = sorted(path.parent.name for path in FOLDER.glob("*/expected.json"))


@pytest.mark.parametrize("commit", COMMITS)
def test_a_saved_model_answers_as_when_it_was_saved(commit):
    loaded = acm.load(FOLDER / commit / "saved", base_model=model()[0])
    expected = json.loads((FOLDER / commit / "expected.json").read_text())
    for budget, outputs in expected.items():
        acm.set_budget(loaded, float(budget))
        torch.testing.assert_close(loaded(examples(4)), torch.tensor(outputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("commit", COMMITS)
def test_a_stopped_run_is_carried_on(commit, tmp_path):
    shutil.copytree(FOLDER / commit / "run", tmp_path / "run")
    lines = []
    recipe = load_recipe(FOLDER / "recipe.yaml")
    evaluation = run_recipe(recipe, RunOptions(directory=tmp_path / "run", resume=True), say=lines.append)
    assert [budget.asked for budget in evaluation.budgets] == [0.5, 1.0]
    assert not any("phase distill" in line for line in lines)
    assert any("phase finetune done" in line for line in lines)
    assert not (tmp_path / "run" / "state").exists()
