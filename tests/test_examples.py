"""Every script in examples/ runs as it stands, and the README's first steps are one of them."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import acm_compiler as acm
from acm_compiler.recipe import load_recipe
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.run_recipe import run_recipe
from tests.helpers.gguf_files import small_llama, write_gguf

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
QUICK = ("first_steps", "hf_text_model", "own_training_loop")
# name -> packages that are no dependency of this one
SLOW = {
    "compile_and_serve": (),
    "lora_merge": ("peft",),
    "lora_sites": ("peft",),
    "sentence_vectors": ("sentence_transformers",),
    "trainer": (),
}


# what two processes print
RANKS = {
    "ddp": "trained by 2 processes, saved",
    "fsdp": "trained by 2 processes, each with 0.50 of the parameters; saved",
    "tensor_parallel": "split over 2 processes, saved",
}


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*QUICK, *SLOW, *RANKS, "my_project", "side_by_side"}


@pytest.mark.parametrize("name", QUICK)
def test_the_quick_ones(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SLOW)
def test_the_longer_ones(name, tmp_path, monkeypatch):
    for package in SLOW[name]:
        pytest.importorskip(package, reason=f"examples/{name}.py shows the use of {package}")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_two_processes(name, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", f"{name}.py"]
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert RANKS[name] in done.stdout and (tmp_path / "out/model.safetensors").exists()


def test_a_recipe_with_your_own_model_data_and_task(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    recipe = load_recipe(EXAMPLES / "my_recipe.yaml")
    found = run_recipe(recipe, RunOptions(directory=tmp_path / "run"), say=lambda text: None)
    assert found is not None and [round(budget.asked, 2) for budget in found.budgets] == [0.5, 1.0]
    assert len(acm.sites(acm.load(tmp_path / "run", allow_code=True))) == 2


RECIPE = """acm: 1
name: small
model: {{source: hf, name: {0}, gguf: small.gguf}}
input: {{tokens: 32}}
task: {{kind: causal_lm}}
data:
  train: {{kind: texts, split: train, classes: [networkx], tokenizer: {0}/small.gguf, count: 100, max_tokens: 64}}
  eval: {{kind: texts, split: eval, classes: [networkx], tokenizer: {0}/small.gguf, count: 16, max_tokens: 64}}
sites: [{{match: mlp, learners: 4}}]
budgets: {{report: [0.6, 1.0]}}
schedule: [{{phase: calibrate, tokens: 1200, batch: 8}}]
"""


def test_a_run_from_a_gguf_file_is_shown_at_its_budgets_and_beside_others(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    from benchmarks.decoders import arguments, of_run

    write_gguf(tmp_path / "small.gguf", small_llama(max_position_embeddings=256))
    (tmp_path / "small.yaml").write_text(RECIPE.format(tmp_path))
    run_recipe(load_recipe(tmp_path / "small.yaml"), RunOptions(directory=tmp_path / "run"), say=lambda _: None)
    options = arguments().parse_args(["--model", "run", "--against", "teal", "--sparsity", ".3"])
    shown = list(of_run(tmp_path / "run", options))
    rows = [row.split(" |")[0] for row in shown]
    assert rows[2:4] == ["| 0.6", "| 1"] and "| 0.6, 0.3 skipped" in rows
    assert rows[-13:-8] == [f"| teal, {share}" for share in (0.75, 0.6, 0.5, 0.4, 0.25)]
    few = arguments().parse_args(["--model", "run", "--against", "teal", "--shares", ".5", ".6"])
    fewer = list(of_run(tmp_path / "run", few))
    assert [row.split(" |")[0] for row in fewer if row.startswith("| teal, 0")] == ["| teal, 0.6", "| teal, 0.5"]
    assert any(row.startswith("| at a share") and row.endswith("| 0.6 | 0.5 |") for row in fewer)
    ours = {"gates alone": "which save in every call"}
    ours["small values skipped"] = "which saves where a token is computed at a time"
    behind = [f"| teal, less ours, {which}" for which in ours]
    assert rows[-5:] == [*(f"| ours, {which}, {when}" for which, when in ours.items()), "| teal", *behind]
    assert all(row.split("|")[4].count("%") == 3 for row in shown[-5:])  # a figure and its interval at .5
    arguments = [str(tmp_path / "run"), "the cat", "--tokens", "4", "--budgets", "1", ".6"]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", *arguments])
    runpy.run_path(str(EXAMPLES / "side_by_side.py"))
    shown = capsys.readouterr().out
    assert "the cat" in shown and "| 1 (1" in shown and "| 0.6 (" in shown


def test_the_first_steps_of_the_readme_are_the_example():
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    _, _, code = (EXAMPLES / "first_steps.py").read_text().partition('"""\n\n')
    assert block == code
