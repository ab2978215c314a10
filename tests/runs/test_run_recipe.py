"""Recipes carried out on folders of pictures: the paper's ImageNet recipe, and everything a folder can be wrong in."""

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import vision_transformer
from typer.testing import CliRunner

from acm_compiler.checkpoint import locked
from acm_compiler.cli import app
from acm_compiler.data import BatchStream, open_dataset
from acm_compiler.errors import RunInterrupted
from acm_compiler.passes.rewrite import offload
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.recipe import expand_paths, load_recipe, recipe_hash
from acm_compiler.recipe.tasks import ExpectConfig
from acm_compiler.runs import opened, run_recipe
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.pipeline import convert, plan_recipe
from acm_compiler.runs.run_recipe import RecipeRun
from acm_compiler.tasks.base import base_metric
from acm_compiler.training.machine import open_machine
from acm_compiler.training.schedule import run_schedule
from acm_compiler.training.state import StateStore
from tests.helpers import ROOT
from tests.helpers.training_runs import changed, parts_of

pytestmark = pytest.mark.usefixtures("rough_budgets")
CLASSES = ("circle", "cross", "line")
FOLDER = """
acm: 1
name: folder
model: {source: python, name: "tests.helpers.tour_model:pictures", weights: null}
input: {image: [3, 16, 16]}
task: {kind: classify}
data:
  train: {kind: imagefolder, root: "${PICTURES}/train"}
  eval: {kind: imagefolder, root: "${PICTURES}/val"}
sites: [{match: mlp, init: random}]
budgets: {report: [0.5, 1.0]}
schedule: [{phase: distill, steps: 6, batch: 4}]
"""
MODULE = "tests.helpers.tour_model"
TWO_PHASES = ("--set", "schedule=[{phase: distill, steps: 6, batch: 4}, {phase: gate, steps: 2, batch: 4}]")


def make_pictures(root, *, count: int = 4, side: int = 20, classes=CLASSES) -> None:
    """Folders train and val; every class has a colour of its own under noise."""
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for number, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            colour = np.eye(3)[number % 3] * 160
            for i in range(count):
                pixels = colour + draw.integers(0, 90, (side, side, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


def test_the_papers_recipe_plans_the_mlp_and_four_projections_of_twelve_layers():
    _, plan, _ = plan_recipe(load_recipe("vit_b16_imagenet"))
    assert len(plan.sites) == 60 and "4 x 768" in str(plan)


def test_the_papers_recipe_lowers_its_losses_and_trains_its_groups_on_stand_in_pictures(tmp_path, monkeypatch):
    make_pictures(tmp_path, count=8, side=36)
    monkeypatch.setenv("IMAGENET", str(tmp_path))
    # two layers of its twelve
    build = vision_transformer._vision_transformer
    monkeypatch.setattr(vision_transformer, "_vision_transformer", lambda *_, **o: build(**o | {"num_layers": 2}))
    monkeypatch.setattr(StateStore, "save", lambda *_, **__: None)  # tests/training/test_resume.py has it
    small = ["model.weights=null", "model.args.num_classes=3", "model.args.image_size=32", "input.image=[3, 32, 32]"]
    quick = [f"schedule[{i}].{key}" for i in range(3) for key in ("epochs=null", "steps=4", "batch=8")]
    recipe = expand_paths(
        load_recipe("vit_b16_imagenet", [*small, *quick, "expect=null", "run.precision=fp32", "run.workers=0"])
    )
    said: list[str] = []
    run = RecipeRun(recipe, open_machine(recipe.run.precision, "cpu"), said.append)
    options = RunOptions(directory=tmp_path / "out")
    _, model = run.prepare(options, report=said.append)
    assert len(sites(model)) == 2 * 5 and "4 x 768" in said[0]
    parts, groups, losses = [parts_of(model)], [], []

    def note(model, phase, seconds) -> None:
        groups.append(changed(parts.pop(), model))
        parts.append(parts_of(model))
        losses.append(task_loss(model, run))

    job = dataclasses.replace(run.job(options), on_phase_end=note, evaluate=None, measure=None)
    run_schedule(model, recipe.schedule, job)
    assert groups == [{"learners"}, {"gate"}, {"learners", "gate", "rest"}]
    assert all(acm.state == "learners" for acm in sites(model).values())
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    for phase in ("distill", "gate"):
        values = [line["loss"] for line in lines if line["phase"] == phase]
        assert len(values) == 4 and sum(values[2:]) < 0.95 * sum(values[:2]), phase
    # mixup makes every batch another task: finetune is judged on the same plain pictures before and after
    assert losses[2] < losses[1]


def task_loss(model, run) -> float:
    """The task's loss on all held-out stand-in pictures."""
    held_out = open_dataset(run.data.eval, image_size=(32, 32))
    (batch,) = BatchStream(dataset=held_out, batch=len(held_out)).epoch()
    with torch.no_grad():
        return float(run.task.loss(model.eval()(batch["image"]), batch))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_pictures(tmp_path)
    (tmp_path / "folder.yaml").write_text(FOLDER)
    monkeypatch.setenv("PICTURES", str(tmp_path))
    return tmp_path


def test_a_task_that_compares_with_the_dense_model_is_watched_beside_it(folder):
    run = RecipeRun(expand_paths(load_recipe(folder / "folder.yaml")), open_machine("fp32", "cpu"), lambda _: None)
    _, model = run.prepare(RunOptions(directory=folder / "out"), report=lambda _: None)
    run.__dict__["task"] = SimpleNamespace(
        **{name: getattr(run.task, name) for name in ("inputs", "call_arguments", "units")},
        metric="distance",
        needs_dense=True,
        remember=lambda output, batch: {**batch, "dense": output},
        score=lambda output, batch: (output - batch["dense"]).abs().amax(1),
        value=lambda scores, _: float(scores.max()),
    )
    torch.nn.init.normal_(model.heads.head.weight)  # torchvision's is zero
    run.model.heads.head.weight.data.copy_(model.heads.head.weight)
    (acm,) = sites(model).values()
    assert run.watch(model)["distance"] > 1e-3
    acm.state = "dense"
    assert run.watch(model)["distance"] == pytest.approx(0, abs=1e-5)


def rewrite(folder, *words: str):
    return CliRunner().invoke(app, ["rewrite", "--recipe", f"{folder}/folder.yaml", "--out", f"{folder}/out", *words])


def test_a_folder_of_pictures_is_enough(folder):
    # what `acmc plan --out` wrote is no result that could be lost
    (folder / "out").mkdir()
    (folder / "out/plan.json").write_text("{}")
    result = rewrite(folder)
    assert result.exit_code == 0, result.stderr
    assert {"plan.json", "model.safetensors", "eval.json"} <= {path.name for path in (folder / "out").iterdir()}


@pytest.mark.filterwarnings("ignore:the model's answer is zero")
@pytest.mark.filterwarnings("ignore:too few tokens")
def test_a_run_that_offloads_leaves_the_same_weights_and_no_other_file(folder, monkeypatch):
    monkeypatch.setattr(offload, "_SMALL", 1)
    words = ("--set", "schedule=[{phase: calibrate, tokens: 100, batch: 4}]", "--force")
    written = []
    for more in ((), ("--set", f"run.offload={folder}/large"), ("--set", "run.offload=cpu")):
        done = rewrite(folder, *words, *more, "--set", "run.device=cpu")
        assert done.exit_code == 0, done.stderr
        written.append(load_file(folder / "out/model.safetensors"))
    plain, *others = written
    for other in others:
        assert plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)
    assert os.listdir(folder / "large") == []


@pytest.mark.parametrize(
    ("schedule", "lent"),
    [("{phase: distill, steps: 1, batch: 4}", True), ("{phase: finetune, steps: 1, batch: 4}", False)],
)
def test_weights_that_no_phase_changes_are_in_memory_once(schedule, lent, folder):
    recipe = expand_paths(load_recipe(str(folder / "folder.yaml"), [f"schedule=[{schedule}]"]))
    dense, model = convert(recipe, lambda line: None)
    kept = {name: parameter for name, parameter in model.named_parameters() if name in dict(dense.named_parameters())}
    assert kept
    for name, parameter in kept.items():
        assert parameter is not dense.get_parameter(name)
        assert (parameter.data_ptr() == dense.get_parameter(name).data_ptr()) == lent


@pytest.mark.filterwarnings("ignore:too few tokens")
def test_learners_are_quantised_once_the_schedule_is_done(folder):
    words = (*TWO_PHASES, "--set", "run.quantize=int8")
    assert rewrite(folder, *words, "--until", "distill").exit_code == 0
    assert "quantized" not in (folder / "out/budgets.json").read_text()
    done = rewrite(folder, *words, "--resume")
    assert done.exit_code == 0 and done.stderr.index("phase gate done") < done.stderr.index("learners: int8")
    assert "budgets: " in done.stderr[done.stderr.index("learners: int8") :]
    weights = load_file(folder / "out/model.safetensors")
    assert {str(t.dtype) for name, t in weights.items() if name.endswith("w_in")} == {"torch.int8"}
    checked = CliRunner().invoke(app, ["eval", f"{folder}/out", "--allow-code", "--budgets", "0.7"])
    assert checked.exit_code == 0, checked.stderr
    # floats are the result of another recipe
    assert "run.quantize: int8 -> null" in said_by(rewrite(folder, *TWO_PHASES, "--resume"))


@pytest.mark.filterwarnings("ignore:too few tokens")
def test_the_rest_is_quantised_saved_and_evaluated_where_a_recipe_says_so(folder):
    done = rewrite(folder, *TWO_PHASES, "--set", "run.quantize={rest: true}")
    assert done.exit_code == 0 and "linears outside of ACMs" in done.stderr, done.stderr
    assert any(name.endswith(".values") for name in load_file(folder / "out/model.safetensors"))
    checked = CliRunner().invoke(app, ["eval", f"{folder}/out", "--allow-code", "--budgets", "0.7"])
    assert checked.exit_code == 0, checked.stderr
    refused = rewrite(folder, *TWO_PHASES, "--set", "run.quantize={exclude: head}")
    assert refused.exit_code == 2 and "rest: true" in said_by(refused)


def test_linears_to_quantise_that_are_not_there_are_refused_before_anything_is_trained(folder):
    refused = rewrite(folder, *TWO_PHASES, "--set", "run.quantize={rest: true, exclude: haed}")
    assert refused.exit_code == 2 and "no linear outside of ACMs matches 'haed' nearest: heads.head" in said_by(refused)
    assert not (folder / "out/metrics.jsonl").exists()


@pytest.mark.filterwarnings("ignore:too few tokens")
def test_4_bits_are_rounded_by_the_data_that_a_recipe_trains_on(folder):
    done = rewrite(folder, *TWO_PHASES, "--set", "run.quantize={weights: int4, rest: true}")
    assert done.exit_code == 0, done.stderr
    report = done.stderr
    assert report.index("phase gate done") < report.index("quantize: inputs of") < report.index("layers rounded")
    assert "budgets: " in report[report.index("layers rounded") :]
    weights = load_file(folder / "out/model.safetensors")
    assert {str(t.dtype) for name, t in weights.items() if name.endswith(("w_in", ".values"))} == {"torch.uint8"}
    checked = CliRunner().invoke(app, ["eval", f"{folder}/out", "--allow-code", "--budgets", "0.7"])
    assert checked.exit_code == 0, checked.stderr


def test_the_lowest_k_of_the_budget_table_outlives_the_quantisation(folder):
    recipe = expand_paths(load_recipe(folder / "folder.yaml", ["run.quantize=int8"]))
    run = RecipeRun(recipe, open_machine("fp32", "cpu"), lambda _: None)
    _, model = run.prepare(RunOptions(directory=folder / "out"), report=lambda _: None)
    run.measure_budgets(model, k_lo=2)
    run.quantize(model)
    owner = conversion(model)
    assert owner.quantized == "int8" and {point.k_lo for point in owner.table.points} == {2}


def test_pictures_come_in_the_models_size_where_the_recipe_names_none(folder):
    done = rewrite(folder, "--set", f"model.name={MODULE}:pictures_with_example", "--set", "input=null")
    assert done.exit_code == 0, done.stderr
    checked = CliRunner().invoke(app, ["eval", f"{folder}/out", "--allow-code", "--budgets", "1"])
    assert checked.exit_code == 0, checked.stderr


def test_data_that_the_model_does_not_take_are_refused_before_anything_is_trained(folder):
    words = [word for part in ("train", "eval") for word in ("--set", f"data.{part}={{kind: python:{MODULE}:data}}")]
    refused = rewrite(folder, *words, "--dry-run")
    assert refused.exit_code == 2 and "the model itself raises on a batch of" in said_by(refused)
    assert "dry run" not in refused.stdout


def test_a_data_set_may_hold_examples_that_cannot_be_used(folder):
    sections = ("--set", f"data={{train: {{kind: python:{MODULE}:few}}, eval: {{kind: python:{MODULE}:few}}}}")
    words = ("--set", f"model.name={MODULE}:model", "--set", "input=null", *sections)
    checked = rewrite(folder, *words, "--dry-run")
    assert checked.exit_code == 0, checked.stderr


def test_a_run_without_data_is_one_json_document_too(folder):
    words = ("--set", "data=null", "--set", "task=null", "--set", "schedule=[]", "--json")
    for more in ((), ("--resume",)):
        done = rewrite(folder, *words, *more)
        assert json.loads(done.stdout) == {"schema": 1, "directory": f"{folder}/out"}, done.stderr


def test_an_unfinished_run_is_not_thrown_away(folder):
    assert rewrite(folder, *TWO_PHASES, "--until", "distill").exit_code == 0
    refused = rewrite(folder, *TWO_PHASES)
    assert refused.exit_code == 2
    assert "continue it: acmc rewrite" in refused.stderr and "--resume" in refused.stderr
    # what does not change the model may change between the two
    assert rewrite(folder, *TWO_PHASES, "--resume", "--set", "run.save_every=1h").exit_code == 0
    assert not (folder / "out/state").exists()


def test_a_run_that_is_stopped_while_it_is_evaluated_goes_on_from_there(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(RecipeRun, "judge", lambda *_: signal.default_int_handler(signal.SIGINT, None))
        stopped = rewrite(folder)
    assert stopped.exit_code == 130 and "stopped while evaluating, with all phases done and saved" in stopped.stderr
    command = stopped.stderr.partition("continue: acmc ")[2].strip()
    lines = (folder / "out/metrics.jsonl").read_text()
    assert CliRunner().invoke(app, shlex.split(command)).exit_code == 0
    assert (folder / "out/metrics.jsonl").read_text() == lines


def test_an_unfinished_run_is_started_over_where_that_is_asked_for(folder):
    assert rewrite(folder, *TWO_PHASES, "--until", "distill").exit_code == 0
    lines = (folder / "out/metrics.jsonl").read_text().count("\n")
    done = rewrite(folder, "--force", "--set", "schedule[0].steps=4")
    assert done.exit_code == 0 and "starts over, without the state of the unfinished run in" in said_by(done)
    assert lines > (folder / "out/metrics.jsonl").read_text().count("\n") > 0
    assert not (folder / "out/state").exists()


def test_resume_and_force_together_continue_the_unfinished_and_replace_the_finished(folder):
    words = (*TWO_PHASES, "--resume", "--force")
    assert rewrite(folder, *TWO_PHASES, "--until", "distill").exit_code == 0
    lines = (folder / "out/metrics.jsonl").read_bytes()
    continued = rewrite(folder, *words)
    assert continued.exit_code == 0 and "continues the unfinished run in" in said_by(continued)
    assert (folder / "out/metrics.jsonl").read_bytes().startswith(lines)
    replaced = rewrite(folder, *words, "--set", "run.seed=7")
    assert replaced.exit_code == 0 and "--force: replaces the model in" in said_by(replaced)
    assert not (folder / "out/metrics.jsonl").read_bytes().startswith(lines)


def test_a_run_that_stops_early_says_what_is_left_and_how_to_go_on(folder):
    stopped = rewrite(folder, *TWO_PHASES, "--until", "distill")
    assert "stopped after distill; still to come: gate" in said_by(stopped)
    words = shlex.split(stopped.stderr.partition("go on: ")[2])
    metrics = (folder / "out/metrics.jsonl").read_bytes()
    # what is done is not done again, nor what comes after it
    assert "still to come: gate" in said_by(rewrite(folder, *TWO_PHASES, "--resume", "--until", "distill"))
    assert (folder / "out/metrics.jsonl").read_bytes() == metrics
    done = CliRunner().invoke(app, words[words.index("rewrite") :])
    assert done.exit_code == 0 and "still to come" not in done.stderr
    assert not (folder / "out/state").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [("notes.txt", "holds files that are not ours"), ("state/1-0/state.json", "has left its state here")],
)
def test_a_dry_run_refuses_the_folder_that_the_run_would(name, words, folder):
    path = folder / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    for options in ([], ["--dry-run"]):
        refused = rewrite(folder, *options)
        assert refused.exit_code == (1 if name == "notes.txt" else 2) and words in said_by(refused)
    assert "share of the dense model" in refused.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--until", "distil"), "no phase 'distil' (did you mean 'distill'?)"),
        (("--set", "model.freeze=[blcks.0]"), "no parameter matches 'blcks.0'"),
        (("--set", "run.device=cuda:99"), "run.device: no such device here (found 'cuda:99', expected cpu"),
        (
            ("--set", "task={kind: 'python:tests.helpers.tour_model:no_task'}"),
            "module tests.helpers.tour_model has no 'no_task'",
        ),
        (
            ("--set", "data.train={kind: 'python:tests.helpers.tour_model:data', args: {foo: 1}}"),
            "does not take the recipe's args (found got an unexpected keyword argument 'foo'",
        ),
        (
            (
                "--set",
                "data.eval={kind: text_rows, rows: 'python:tests.helpers.tour_model:data', "
                "args: {foo: 1}, label: l, tokenizer: none}",
            ),
            "does not take the recipe's args (found got an unexpected keyword argument 'foo'",
        ),
        (
            ("--set", "task={kind: 'python:tests.helpers.tour_model:data', args: {foo: 1}}"),
            "does not take the recipe's args (found got an unexpected keyword argument 'foo'",
        ),
        (("--set", "data.train.root=/nowhere"), "/nowhere"),
        (("--set", "schedule[0].batch=64"), "does not fill one batch (found 12 examples, expected at least 64)"),
        (
            ("--set", "data.eval={kind: 'python:tests.helpers.tour_model:broken_data'}"),
            "the data set raised OSError: the disk is gone",
        ),
        (("--set", "model.weights=nowhere.safetensors"), "nowhere.safetensors: no such weights file"),
        (("--set", "expect={at_least: 0.99, examples: 5}"), "does not reach the accuracy that the recipe expects"),
        (("--set", "model.args={foo: 1}"), "does not take the recipe's args"),
        (("--set", "model.name=tests.helpers.tour_model:failing"), "the function raised RuntimeError: nothing here"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(change, words, folder):
    for options in ([], ["--dry-run"]):
        refused = rewrite(folder, *change, *options)
        assert refused.exit_code in (1, 2, 5) and words in said_by(refused)
        assert "Traceback" not in said_by(refused) and not (folder / "out/metrics.jsonl").exists()


def test_a_dry_run_of_what_may_replace_or_resume_a_run_is_none_the_worse(folder):
    (folder / "out/state/1-0").mkdir(parents=True)
    (folder / "out/state/1-0/state.json").write_text("{}")
    for option in ("--force", "--resume"):
        done = rewrite(folder, "--dry-run", option)
        assert done.exit_code == 0
        assert "dry run: model, data, plan and folder were checked, nothing written" in done.stdout


def test_a_run_past_the_phase_to_stop_after_is_left_as_it_is(folder):
    phases = ", ".join(f"{{phase: {name}, steps: 1, batch: 4}}" for name in ("distill", "gate", "finetune"))
    words = ("--set", f"schedule=[{phases}]")
    assert rewrite(folder, *words, "--until", "gate").exit_code == 0
    files = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    refused = rewrite(folder, *words, "--resume", "--until", "distill")
    assert refused.exit_code == 2 and "the run is past the end of phase 'distill'" in said_by(refused)
    assert "share of the dense model" not in said_by(refused) and "continues" not in said_by(refused)
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()} == files


def test_a_run_that_stops_after_its_last_phase_is_finished(folder):
    last = rewrite(folder, *TWO_PHASES, "--until", "gate")
    assert last.exit_code == 0 and "still to come" not in last.stderr
    assert "finished before" in rewrite(folder, *TWO_PHASES, "--resume").stderr


def said_by(result) -> str:
    """Messages of a command beside its result, on one line."""
    return " ".join(result.stderr.split())


def contents(place) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_a_finished_result_is_not_replaced_unasked(folder):
    assert rewrite(folder).exit_code == 0
    before = contents(folder / "out")
    refused = rewrite(folder, "--set", "run.seed=7")
    said = " ".join(refused.stderr.split())
    assert refused.exit_code == 2 and "out: the folder holds a saved model" in said
    assert "--out" in said and "--force" in said
    refused = rewrite(folder, "--set", "run.seed=7", "--resume")
    said = " ".join(refused.stderr.split())
    assert refused.exit_code == 2 and "of another recipe (there -> now): run.seed: 0 -> 7" in said and "--force" in said
    assert contents(folder / "out") == before
    # the same run again is done already, however often it is resumed
    done = rewrite(folder, "--resume", "--set", "run.save_every=1h", "--json")
    assert done.exit_code == 0 and "finished before" in done.stderr
    assert contents(folder / "out") == before
    assert json.loads(done.stdout)["budgets"] == json.loads(before["eval.json"])["budgets"]


def test_evaluations_run_as_many_examples_at_once_as_the_recipe_says(folder, monkeypatch):
    sizes = []
    watched = opened.with_progress

    def watch(batches, *args, **kwargs):
        for batch in watched(batches, *args, **kwargs):
            sizes.append(len(next(iter(batch.values()))))
            yield batch

    for place in (opened, run_recipe):
        monkeypatch.setattr(place, "with_progress", watch)
    assert rewrite(folder, "--set", "run.eval_batch=3").exit_code == 0
    first = sizes.copy()
    assert max(first) == 3 and len(first) > 1
    for words in ([], ["--batch", "2"]):
        sizes.clear()
        assert CliRunner().invoke(app, ["eval", f"{folder}/out", "--allow-code", *words]).exit_code == 0
        assert max(sizes) == (2 if words else 3) and sum(sizes) == sum(first)


def test_an_evaluation_afterwards_joins_that_of_the_run(folder):
    assert (
        rewrite(
            folder, "--set", "schedule=[{phase: distill, steps: 2, batch: 4}, {phase: gate, steps: 2, batch: 4}]"
        ).exit_code
        == 0
    )
    before = json.loads((folder / "out/eval.json").read_text())
    done = CliRunner().invoke(app, ["eval", f"{folder}/out", "--budgets", ".9", "--allow-code"])
    assert done.exit_code == 0, done.stderr
    after = json.loads((folder / "out/eval.json").read_text())
    assert [row["asked"] for row in after["budgets"]] == [0.5, 0.9, 1.0]
    assert after["budgets"][0] == before["budgets"][0] and after["subject"] == before["subject"]


def test_a_run_that_replaces_a_result_is_continued_as_such(folder):
    assert rewrite(folder).exit_code == 0
    started = contents(folder / "out")["model.safetensors"]

    def stop(model, schedule, job, **_):
        raise RunInterrupted("stopped before any state was saved", fix=f"start it over: {job.resume_command}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("acm_compiler.runs.run_recipe.run_schedule", stop)
        stopped = rewrite(folder, "--force")
    assert stopped.exit_code == 130 and stopped.stderr.rstrip().endswith("--resume --force")
    assert contents(folder / "out")["model.safetensors"] == started
    # the result from before is not taken for its own
    words = shlex.split(stopped.stderr.rstrip().splitlines()[-1])
    done = CliRunner().invoke(app, words[words.index("rewrite") :])
    assert done.exit_code == 0 and "finished before" not in done.stderr
    again = CliRunner().invoke(app, words[words.index("rewrite") : -1])
    assert again.exit_code == 0 and "finished before" in again.stderr


def test_a_result_that_is_replaced_takes_along_what_was_measured_on_it(folder):
    assert rewrite(folder).exit_code == 0
    before = contents(folder / "out")
    (folder / "out/bench.json").write_text("{}")
    (folder / "out/report").mkdir()
    (folder / "out/report/index.html").write_text("of the first model")
    done = rewrite(folder, "--force", "--set", "run.seed=7")
    assert done.exit_code == 0 and "removed what was measured" in done.stderr and "bench.json, report" in done.stderr
    after = contents(folder / "out")
    assert set(after) == set(before) and after["model.safetensors"] != before["model.safetensors"]
    # without an evaluation of the new model, that of the old one would pass for it
    done = rewrite(folder, "--force", "--set", "schedule=[]", "--set", "task=null", "--set", "data=null")
    assert done.exit_code == 0 and "eval.json" in done.stderr
    assert "eval.json" not in contents(folder / "out")


def no_train(folder) -> str:
    os.rename(folder / "train", folder / "elsewhere")
    return "train: the folder of images is missing"


def no_eval(folder) -> str:
    os.rename(folder / "val", folder / "elsewhere")
    return "val: the folder of images is missing"


def empty(folder) -> str:
    for picture in (folder / "val").glob("*/*.png"):
        picture.unlink()
    return "val: the data set is empty"


def other_classes(folder) -> str:
    os.rename(folder / "val/line", folder / "val/dot")
    return "the classes of data.eval are not those of data.train (found only here: dot; missing: line)"


def unreadable(folder) -> str:
    for picture in (folder / "train/cross").iterdir():
        picture.write_bytes(b"no picture")
    return "the image cannot be read"


@pytest.mark.parametrize("damage", [no_train, no_eval, empty, other_classes, unreadable], ids=lambda f: f.__name__)
def test_what_is_wrong_with_the_pictures_is_said_before_anything_is_lost(damage, folder):
    message = damage(folder)
    result = rewrite(folder)
    assert result.exit_code == 1 and message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
    left = {path.name for path in (folder / "out").iterdir()} if (folder / "out").exists() else set()
    # only a picture that is read during the training can fail after it began
    assert left <= ({"metrics.jsonl"} if damage is unreadable else set())


def test_a_model_that_is_not_a_number_stops_the_run_and_names_the_place(folder):
    result = rewrite(folder, "--set", "model.args={broken: true}")
    assert result.exit_code == 1
    assert "is not finite; first seen at parameter conv_proj.weight" in result.stderr.replace("\n", " ")
    assert not (folder / "out/model.safetensors").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_training(folder):
    (folder / "out").write_text("a file, no folder")
    result = rewrite(folder)
    assert result.exit_code == 1 and "out" in result.stderr and "Traceback" not in result.stderr
    assert (folder / "out").read_text() == "a file, no folder"


@pytest.mark.parametrize("words", [(), ("--resume",), ("--force",)])
def test_a_second_run_in_the_folder_of_another_is_refused(words, folder):
    with locked(folder / "out", pytest.fail):
        result = rewrite(folder, *words)
        assert os.listdir(folder / "out") == [".lock"]
    assert result.exit_code == 2 and f"process {os.getpid()} on " in result.stderr


@pytest.mark.slow
def test_two_processes_report_and_refuse_as_one_does(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "acm_compiler", "rewrite", "--recipe", f"{folder}/folder.yaml", "--out", f"{folder}/out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for code, once in ((0, ["the result goes to", "saved in"]), (1, ["the result goes to", "holds a saved model"])):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code, done.stderr
        assert [(done.stdout + done.stderr).count(words) for words in once] == [1, 1], done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX's")
def test_a_full_disk_loses_nothing(folder):
    assert rewrite(folder).exit_code == 0
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.suffix == ".safetensors"}
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "from acm_compiler.cli import main\n"
        f"sys.argv = 'acmc rewrite --recipe {folder}/folder.yaml --out {folder}/out --force'.split()\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    after = {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.suffix == ".safetensors"}
    assert after == before
    assert not [path for path in folder.iterdir() if path.name.startswith(".") or "tmp" in path.name]


@pytest.mark.parametrize("command", [["plan"], ["rewrite", "--dry-run", "--recipe"], ["rewrite", "--recipe"]])
def test_a_budget_out_of_reach_is_refused_at_its_line_before_the_training(command, folder):
    text = FOLDER.replace("match: mlp", "match: mlp, k_min: 1").replace("report: [0.5, 1.0]", "report: [0.5, 0.2]")
    (folder / "folder.yaml").write_text(text)
    result = CliRunner().invoke(app, [*command, f"{folder}/folder.yaml"])
    assert result.exit_code == 4
    assert "folder.yaml:11:25: no setting of this model reaches this budget" in result.stderr.replace("\n", " ")
    assert "expected 0.250 to 1" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ("{metric: 0.95, within: 0.02}", "expected 0.95 within 0.02"),
        ("{at_least: 0.9}", "expected at least 0.9"),
        ("{at_least: -2, at_most: -1}", "expected at least -2, at most -1"),
    ],
)
def test_a_base_model_that_is_not_what_was_expected_stops_the_run_before_it_begins(expect, message, folder):
    (folder / "folder.yaml").write_text(f"{FOLDER}expect: {expect}\n")
    result = rewrite(folder)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 5 and "Traceback" not in said
    assert (
        "folder.yaml:13:9: the model to convert does not reach the accuracy that the recipe expects (found 0." in said
    )
    assert message in said and "--set expect=null" in said
    assert not (folder / "out").exists()
    # who disagrees says so, and is not asked again when the run goes on
    assert rewrite(folder, *TWO_PHASES, "--set", "expect=null", "--until", "distill").exit_code == 0
    assert rewrite(folder, *TWO_PHASES, "--resume").exit_code == 0


def test_a_base_model_that_is_as_expected_is_converted(folder):
    (folder / "folder.yaml").write_text(f"{FOLDER}expect: {{at_most: 1.0, examples: 5}}\n")
    result = rewrite(folder)
    assert result.exit_code == 0 and "the dense model's accuracy is 0." in result.stderr


def test_the_expected_metric_is_the_dense_models_own(folder):
    recipe = expand_paths(load_recipe(folder / "folder.yaml"))
    run = RecipeRun(recipe, open_machine("fp32", "cpu"), lambda text: None)
    dense, model = run.prepare(RunOptions(directory=folder / "out"), report=lambda text: None)
    batches = list(BatchStream(dataset=open_dataset(recipe.data.eval, image_size=(16, 16)), batch=5).epoch())
    evaluation = run.judge(model, dense)
    assert base_metric(dense.train(), batches, run.task) == pytest.approx(evaluation.metric.dense)
    assert dense.training and dense.conv_proj.training
    text = recipe_hash(recipe), recipe_hash(recipe.model_copy(update={"expect": ExpectConfig(at_least=0.5)}))
    assert text[0] == text[1]  # it changes nothing in what is made
