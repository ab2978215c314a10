"""Measuring what Python made: `acm.evaluate`, `acm.report`, and the verbs on folders of `acm.save`."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.checkpoint import save_id
from acm_compiler.cli import app
from acm_compiler.data import as_batch
from acm_compiler.errors import DataError, NoBudgetTable, UsageError
from acm_compiler.evaluation.times import OURS, Times, load_times, save_times
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.planning.call_times import device_name
from acm_compiler.recipe.models import InputConfig, ModelConfig
from acm_compiler.runtime.measure_budgets import measure_budgets
from acm_compiler.sources.build import build
from tests.helpers import tour_model
from tests.helpers.pictures import OPEN, TASK, picture_batch, picture_model
from tests.reporting.test_page import TIMES

ON_DATA = ["--data", "python:tests.helpers.tour_model:data", "--task", "classify"]
BASE = ["--base-model", "python:tests.helpers.tour_model:model"]


def accuracy(output, batch):
    """One per right answer."""
    return output.argmax(-1) == batch["label"]


def pairs(count=12):
    """Batches as a loader of images and labels gives them."""
    batch = picture_batch(count)
    return [(batch["image"], batch["label"])]


def test_a_task_by_name_and_a_metric_of_ones_own_measure_the_same():
    model = picture_model()
    by_task = acm.evaluate(model, pairs(), task="classify", budgets=[OPEN, 1.0])
    by_metric = acm.evaluate(model, pairs(), metric=accuracy, budgets=[OPEN, 1.0])
    by_section = acm.evaluate(model, pairs(), task={"kind": "classify"}, budgets=[OPEN, 1.0])
    assert [b.metric for b in by_task.budgets] == [b.metric for b in by_metric.budgets]
    assert [b.metric for b in by_section.budgets] == [b.metric for b in by_task.budgets]
    assert by_task.metric.name == by_metric.metric.name == "accuracy" and not by_task.fixed
    assert str(by_task).splitlines()[0].split()[:2] == ["budget", "reached"]


def test_a_metric_reads_labels_by_the_name_that_its_loader_gives_them():
    batches = [{"image": image, "labels": label} for image, label in pairs()]
    found = acm.evaluate(picture_model(), batches, metric=lambda y, b: y.argmax(-1) == b["labels"], budgets=[1.0])
    by_pairs = acm.evaluate(picture_model(), pairs(), metric=accuracy, budgets=[1.0])
    assert found.budgets[0].metric == by_pairs.budgets[0].metric


def test_a_task_of_a_users_own_reads_its_data_under_the_names_that_training_gives_it():
    class Reads:
        metric = "accuracy"
        mask = staticmethod(lambda batch: None)
        inputs = staticmethod(lambda batch: batch["image"])
        units = staticmethod(lambda batch: torch.ones(len(batch["labels"])))
        score = staticmethod(lambda output, batch: (output.argmax(-1) == batch["labels"]).float())
        answer = staticmethod(lambda output, mask=None: output)

    batches = [{"image": image, "labels": label} for image, label in pairs()]
    found = acm.evaluate(picture_model(), batches, Reads(), budgets=[1.0])
    by_metric = acm.evaluate(picture_model(), pairs(), metric=accuracy, budgets=[1.0])
    assert found.budgets[0].metric == by_metric.budgets[0].metric


def test_a_score_that_is_not_finite_is_refused_where_it_is_met():
    def broken(output, batch):
        return torch.where(batch["label"] == batch["label"][0], torch.inf, output.sum(-1))

    with pytest.raises(DataError, match=r"scores of broken must be finite .*nan or infinity at \d+ of 12"):
        acm.evaluate(picture_model(), pairs(), metric=broken, budgets=[1.0])


def test_without_budgets_those_of_a_recipe_in_reach_are_measured_and_every_k():
    found = acm.evaluate(picture_model(), pairs(), task=TASK)
    assert [b.asked for b in found.budgets] == [0.4, 0.6, 0.75, 1.0], "0.25 is below what this model reaches"
    assert [f.k for f in found.fixed] == [0, 1, 2, 3, 4]


def test_a_metric_is_lower_or_higher_better_and_has_the_name_of_its_function():
    def squared_error(output, batch):
        return (output - torch.eye(3)[batch["label"]]).square().sum(-1)

    found = acm.evaluate(picture_model(), pairs(), metric=squared_error, lower_is_better=True, budgets=[1.0])
    assert (found.metric.name, found.metric.lower_is_better) == ("squared error", True)
    assert acm.evaluate(picture_model(), pairs(), metric=lambda o, b: o[:, 0], budgets=[1.0]).metric.name == "metric"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of task and metric"),
        ({"task": "classify", "metric": accuracy}, "exactly one of task and metric"),
        ({"task": "clasify"}, "did you mean 'classify'"),
        ({"task": {"kind": "classify", "label_smoothing": 2}}, "label_smoothing: found 2"),
        ({"task": accuracy}, "goes to metric="),
        ({"metric": lambda output, batch: output.mean()}, "one score per example"),
        ({"metric": lambda output, batch: output[:, 0] / 0 * 0}, "nan for [0-9]+ of [0-9]+ examples"),
    ],
)
def test_what_cannot_judge_is_refused_in_words(options, words):
    with pytest.raises(UsageError, match=words):
        acm.evaluate(picture_model(), pairs(), budgets=[1.0], **options)


def test_batches_of_users_become_batches_of_tensors():
    x, label = torch.zeros(2, 3), torch.tensor([0, 1])
    assert set(as_batch(x)) == {"image"} and set(as_batch((x, label))) == {"image", "label"}
    assert set(as_batch({"input_ids": x, "labels": label})) == {"input_ids", "label"}
    assert set(as_batch(({"input_ids": x}, label))) == {"input_ids", "label"}
    assert set(as_batch([x])) == {"image"} and set(as_batch(({"input_ids": x},))) == {"input_ids"}  # no labels
    for wrong, words in (
        ({"text": ["a", "b"]}, "text: batch must hold tensors"),
        ("abc", "batch must be"),
        ({}, "must"),
    ):
        with pytest.raises(DataError, match=words):
            as_batch(wrong)


def test_a_report_shows_where_the_learners_run_and_says_why_not(tmp_path):
    model = picture_model()
    found = acm.evaluate(model, pairs(), task="classify", budgets=[OPEN, 1.0])
    page = acm.report(model, found, tmp_path / "with", examples=pairs()[0], title="mine < yours")
    assert "mine &lt; yours" in page.read_text() and (tmp_path / "with" / "load_maps.png").is_file()
    page = acm.report(model, found, tmp_path / "without")
    assert "no load maps in this report: acm.report was given no examples" in page.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a user's own class, saved from Python with measured, untrained gates."""
    model, example = tour_model.model()
    model = acm.rewrite(model, acm.plan(model, example, init="random", gate={"hidden": 4}))
    assert {site.gate_width for site in conversion(model).plan.sites} == {4}
    batch = next(iter(DataLoader(tour_model.data(24), batch_size=24)))
    measure_budgets(model, [(batch["tokens"], None)])
    acm.save(model, tmp_path_factory.mktemp("python") / "out")
    found = acm.evaluate(model, DataLoader(tour_model.data(), batch_size=32), task="classify", budgets=[0.6])
    return tmp_path_factory.getbasetemp() / "python0" / "out", found


@pytest.fixture
def out(folder, tmp_path):
    return shutil.copytree(folder[0], tmp_path / "out")


def acmc(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_eval_measures_a_folder_of_save_as_python_does(out, folder):
    done = acmc("eval", out, *ON_DATA, *BASE, "--budgets", ".6", "--json")
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)["budgets"]
    (same,) = folder[1].budgets
    assert row["metric"] == same.metric and row["reached"] == pytest.approx(same.reached)
    assert json.loads(done.stdout)["metric"]["dense_from"] == "original"
    # the report needs no data for what was measured already, and draws the times that bench kept
    save_times(out, Times(**{**{name: getattr(TIMES, name) for name in TIMES.__slots__}, "save": save_id(out)}))
    done = acmc("report", out, *BASE)
    assert done.exit_code == 0 and "no data was named" in done.stderr, done.stderr
    page = (out / "report" / "index.html").read_text()
    assert "Time over budget" in page and "accuracy" in page
    # and measures anew on other data
    done = acmc(
        "report",
        out,
        *BASE,
        "--task",
        "classify",
        "--data",
        "{kind: 'python:tests.helpers.tour_model:data', args: {count: 8}}",
    )
    assert done.exit_code == 0 and "on other data" in done.stderr
    assert "8 examples" in (out / "report" / "index.html").read_text()


def test_times_of_another_model_are_left_out_of_the_report(out):
    save_times(out, TIMES)
    done = acmc("report", out, *ON_DATA, *BASE)
    assert done.exit_code == 0 and "bench.json is of another model" in done.stderr, done.stderr
    assert "Time over budget" not in (out / "report" / "index.html").read_text()


def test_times_that_cannot_be_read_are_said_once_and_before_anything_is_measured(out, caplog):
    (out / "bench.json").write_text("{")
    done = acmc("report", out, *ON_DATA, *BASE)
    assert done.exit_code == 1 and done.stderr.startswith(f"error: {out / 'bench.json'}: times that cannot be read")
    assert done.stderr.count("\n") == 2 and not caplog.records


def test_a_folder_with_times_of_this_device_takes_a_time_for_a_budget(out, caplog):
    (base, _), here = tour_model.model(), device_name(torch.device("cpu"))
    slow, fast = (
        replace(TIMES.rows[0], contender=OURS, batch=4, budget=b, time_ms=ms) for b, ms in ((1.0, 9), (0.7, 4))
    )
    save_times(out, replace(TIMES, rows=(slow, fast), save=save_id(out), device=here))
    assert acm.set_budget(acm.load(out, base_model=base), "5 ms") == pytest.approx(0.7)
    save_times(out, replace(TIMES, rows=(slow, fast), device=here))
    with pytest.raises(NoBudgetTable, match="no times of this model"):
        acm.set_budget(acm.load(out, base_model=base), "5 ms")
    for broken in ("{", '{"schema": 2}'):  # the second is of a later version
        caplog.clear()
        (out / "bench.json").write_text(broken)
        acm.load(out, base_model=base)
        assert "times that cannot be read" in caplog.text


def test_bench_keeps_its_times_and_times_a_dense_model_of_random_weights_where_no_other_is_to_be_had(
    folder, tmp_path, monkeypatch
):
    built = build(ModelConfig(source="shipped", name="digits_vit"), example=InputConfig(image=(3, 36, 36)))
    plan = acm.plan(built.model, built.example_inputs, sites="mlp", init="random", source=built.record)
    acm.save(acm.rewrite(built.model, plan), tmp_path / "out")
    monkeypatch.setattr("acm_compiler.evaluation.bench.check_answers", lambda contest, inputs: 0.0)
    monkeypatch.setattr("acm_compiler.evaluation.bench.measure_model", lambda contest, inputs, **rest: TIMES.rows)
    digits = "{kind: cluttered_digits, split: eval, count: 4}"
    done = acmc("bench", tmp_path / "out", "--data", digits, "--task", "classify", "--batches", "2", "--json")
    assert done.exit_code == 0 and "random weights" in done.stderr, done.stderr
    times = load_times(tmp_path / "out")
    assert times.rows == TIMES.rows and times.save == save_id(tmp_path / "out")
    assert times.threads == torch.get_num_threads() and times.versions["torch"]
    assert json.loads(done.stdout) == json.loads(json.dumps(times.as_json()))


def test_batches_that_the_data_do_not_fill_are_refused_before_anything_is_compiled(out, monkeypatch):
    monkeypatch.setattr("acm_compiler.evaluation.bench.check_answers", lambda *_: pytest.fail("compiled"))
    done = acmc("bench", out, *ON_DATA, *BASE, "--batches", "2,5000")
    assert done.exit_code == 2 and "5000" in done.stderr and "smaller batches" in done.stderr, done.stderr


@pytest.mark.parametrize("sizes", ["", ",", "8,0", "2.5", "²"])
def test_batch_sizes_are_whole_numbers_and_at_least_one(out, sizes):
    done = acmc("bench", out, "--batches", sizes)
    assert done.exit_code == 2 and "--batches: batch sizes must be" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_bench_measures_a_folder_of_save_and_keeps_its_times(out):
    torch._dynamo.reset()
    done = acmc("bench", out, *ON_DATA, *BASE, "--budgets", ".6", "--batches", "2", "--rounds", "2", "--json")
    assert done.exit_code == 0, done.stderr
    times = load_times(out)
    assert times.save == save_id(out) and times.threads == torch.get_num_threads() and times.versions["torch"]
    assert [row["contender"] for row in json.loads(done.stdout)["rows"]] == [row.contender for row in times.rows]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--base-model"),
        (BASE, "no data was named"),
        ([*BASE, "--data", "python:tests.helpers.tour_model:data"], "no task was named"),
        ([*BASE, *ON_DATA[:3], "clasify"], "--task: no such task: unknown kind 'clasify' (did you mean 'classify'?)"),
        (
            [*BASE, "--data", "{kind: imagefolder}", "--task", "classify"],
            "--data: no such data: imagefolder.root:",
        ),
        ([*BASE, "--data", "{kind", "--task", "classify"], "--data: this cannot be read"),
    ],
)
def test_what_is_missing_to_measure_a_folder_is_told(out, words, told):
    for verb in ("eval", "bench", "report", "explain"):
        done = acmc(verb, out, *words)
        assert done.exit_code in (1, 2) and told in done.stderr, (verb, done.stderr)


@pytest.mark.parametrize(
    ("gate", "words"),
    [({"hiden": 4}, "did you mean 'hidden'"), ({"hidden": 0}, "hidden: found 0"), (4, "gate must be a mapping")],
)
def test_gates_that_cannot_be_are_refused_in_words(gate, words):
    with pytest.raises(UsageError, match=words):
        acm.plan(*tour_model.model(), gate=gate)
    assert acm.plan(*tour_model.model(), gate=acm.GateConfig(hidden=3)).sites[0].gate_width == 3
