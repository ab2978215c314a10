"""From a saved run to its table, its charts and its page; and the parts of a report by themselves."""

import copy
import dataclasses
import io
import json
import shutil
import sys

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from acm_compiler.checkpoint import load, save
from acm_compiler.cli import app
from acm_compiler.cli.eval import damage_table
from acm_compiler.data import BatchStream, open_dataset
from acm_compiler.errors import PackageMissing, counted
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.evaluate import evaluate
from acm_compiler.evaluation.loads import Loads, find_load_maps, spread
from acm_compiler.evaluation.results import Evaluation, Interval, MetricResult, joined, load_evaluation
from acm_compiler.evaluation.wording import evaluation_table
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.planning.plan import Plan
from acm_compiler.recipe import load_recipe, resolved_yaml
from acm_compiler.reporting.charts import cost_chart, k_chart
from acm_compiler.reporting.contents import Report
from acm_compiler.reporting.figures import LIGHT, key_of_k, load_scale
from acm_compiler.reporting.load_facts import load_colours, picture_png
from acm_compiler.reporting.page_facts import headline_budget, shared_start
from acm_compiler.reporting.write import write_report
from acm_compiler.runs.given import read_budgets
from acm_compiler.runs.pipeline import convert
from acm_compiler.runtime.budgets import parse_budget
from acm_compiler.runtime.control import FixedK, set_k
from acm_compiler.runtime.measure_budgets import measure_budgets
from acm_compiler.sources.build import build
from tests.helpers import golden
from tests.helpers.pictures import OPEN, TASK, picture_batch, picture_model

pytestmark = pytest.mark.usefixtures("rough_budgets")

RECIPE = """
acm: 1
name: little_digits
description: half a < b
model: {source: shipped, name: digits_vit}
input: {image: [3, 36, 36]}
task: {kind: classify}
data:
  train: {kind: cluttered_digits, split: train, count: 48, seed: 1}
  eval: {kind: cluttered_digits, split: eval, count: 48, seed: 2}
sites: [{match: mlp, init: random}]
budgets: {train: 0.6, report: [0.3, 0.6, 1.0]}
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model with measured, untrained gates."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(folder / "recipe.yaml")
    _, model = convert(recipe, lambda text: None)
    batch = next(BatchStream(dataset=open_dataset(recipe.data.train, image_size=(36, 36)), batch=24).epoch())
    measure_budgets(model, [(batch["image"], None)])
    conversion(model).damage = {name: (0.5, 0.25, 0.125, 0.0625, 0.0) for name in sites(model)}
    save(model, folder / "run", extra={"recipe.yaml": resolved_yaml(recipe)})
    return folder / "run"


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture(scope="module")
def found():
    model = picture_model()
    set_k(other := copy.deepcopy(model), 2)
    return evaluate(model, [picture_batch(36)], TASK, budgets=[OPEN, 1.0, FixedK(2)], dense=other)


@pytest.mark.parametrize("narrow", [False, True])
def test_the_cost_chart_names_the_fixed_k_that_it_does_not_show(found, narrow):
    budget, fixed = found.budgets[0], found.fixed[0]
    near = dataclasses.replace(budget, metric=0.9, metric_error=0.001, difference=None)
    far = [dataclasses.replace(fixed, k=k, metric=metric) for k, metric in ((0, 0.1), (1, 0.2), (3, 0.899))]
    metric = dataclasses.replace(found.metric, dense=0.905)
    shown = dataclasses.replace(found, metric=metric, budgets=(near,), fixed=tuple(far))
    texts = [text.get_text() for axes in cost_chart(shown, LIGHT, narrow=narrow).axes for text in axes.texts]
    (said,) = [text for text in texts if "this part of the axis" in text]
    assert said.startswith("below") and "k = 0" in said and "k = 1" in said and "k = 3" not in said


def acmc(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_eval_prints_one_json_document_and_keeps_it(run):
    done = acmc("eval", run, "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1 and document["n"] == 48
    assert document["metric"]["name"] == "accuracy" and document["metric"]["dense_from"] == "original"
    assert document["metric"]["dense"] > 0.8, "the shipped model, with its weights"
    assert [row["asked"] for row in document["budgets"]] == [0.3, 0.6, 1.0]
    assert all(abs(row["reached"] - row["asked"]) < 0.1 for row in document["budgets"])
    assert [row["k"] for row in document["fixed"]] == [0, 1, 2, 3, 4]
    assert json.loads(load_evaluation(run).to_json()) == document


def test_eval_measures_the_budgets_asked_for_and_prints_a_table(run):
    done = acmc("eval", run, "--budgets", ".4, 95%", "--examples", 10, "--batch", 4)
    assert done.exit_code == 0, done.stderr
    assert "0.40" in done.stdout and "k = 3" in done.stdout and "dense" in done.stdout
    assert "10 examples" in done.stdout
    assert load_evaluation(run).n == 10
    rows = load_evaluation(run).as_json()["budgets"]
    assert [row["asked_as"] for row in rows] == [None, "95%"] and rows[1]["asked"] != 0.95
    assert f"\n95% = {rows[1]['asked']:.2f} " in done.stdout


@pytest.mark.parametrize(
    ("budgets", "code", "words"),
    [
        ("1.2", 4, "to 1"),
        ("40", 4, "mean 0.4, of the learners'"),
        ("1%", 4, "to 1"),
        ("lots", 2, "60%"),
        (",", 2, "--budgets"),
    ],
)
@pytest.mark.parametrize("verb", ["eval", "bench"])
def test_budgets_that_cannot_be_are_refused_before_the_model_is_loaded(run, verb, budgets, code, words):
    (run / "model.safetensors").unlink()
    done = acmc(verb, run, "--budgets", budgets)
    assert done.exit_code == code and words in done.stderr
    assert load_evaluation(run) is None


def test_budgets_are_spelled_alike_everywhere(run):
    plan = Plan.from_json((run / "plan.json").read_text())
    spelled = [0.4, "95%", f"{plan.cost.macs(0.7) / 1e6:.9f} MMACs"]
    shares = read_budgets(run, ",".join(map(str, spelled)))
    assert shares == [parse_budget(budget, plan) for budget in spelled]
    assert shares[1] == pytest.approx(plan.cost.budget_of_macs(0.95 * plan.model.dense_macs))
    assert shares[2] == pytest.approx(0.7)


def test_eval_ends_with_advice_where_there_is_some(run, monkeypatch):
    monkeypatch.setattr(
        "acm_compiler.evaluation.advice.advise_lossless", lambda found, plan, schedule: f"{found.n} {len(plan.sites)}"
    )
    done = acmc("eval", run, "--budgets", "1", "--examples", 6)
    assert done.exit_code == 0 and done.stdout.rstrip().splitlines()[-1] == "advice: 6 4"


def test_a_quick_look_does_not_replace_a_better_evaluation(run):
    assert acmc("eval", run, "--budgets", "1", "--examples", 20).exit_code == 0
    done = acmc("eval", run, "--budgets", "1", "--examples", 5)
    assert done.exit_code == 0 and "20 examples" in done.stderr
    assert load_evaluation(run).n == 20


def asked(run) -> list[float]:
    return [row.asked for row in load_evaluation(run).budgets]


def test_budgets_measured_one_after_the_other_stay_beside_each_other(run):
    assert acmc("eval", run, "--budgets", ".6,.9", "--examples", 10).exit_code == 0
    first = load_evaluation(run)
    # other batch sizes are no other data; what is printed is what was asked for now
    done = acmc("eval", run, "--budgets", ".4,.9", "--examples", 10, "--batch", 4, "--json")
    assert done.exit_code == 0 and "keeps what was measured before" in done.stderr
    assert [row["asked"] for row in json.loads(done.stdout)["budgets"]] == [0.4, 0.9]
    both = load_evaluation(run)
    assert [row.asked for row in both.budgets] == [0.4, 0.6, 0.9] and both.budgets[1] == first.budgets[0]
    assert [row.k for row in both.fixed] == [0, 1, 2, 3, 4]
    # more examples: the rows on fewer are no match, and their end is told
    done = acmc("eval", run, "--budgets", "1", "--examples", 12)
    assert asked(run) == [1.0] and "held budgets 0.4, 0.6, 0.9 on 10 examples" in done.stderr


def test_an_evaluation_of_the_model_that_was_here_before_is_not_mixed_with_todays(run):
    assert acmc("eval", run, "--budgets", ".6", "--examples", 10).exit_code == 0
    save(load(run), run)
    done = acmc("eval", run, "--budgets", ".4", "--examples", 5)
    assert done.exit_code == 0, done.stderr
    assert asked(run) == [0.4] and "not of this model: it is replaced" in done.stderr


def test_a_report_measures_anew_what_is_of_another_model(run):
    assert acmc("eval", run, "--budgets", "1").exit_code == 0
    save(load(run), run)
    done = acmc("report", run)
    assert done.exit_code == 0 and "of another model" in done.stderr
    assert asked(run) == [0.3, 0.6, 1.0]


def test_an_evaluation_on_other_data_leaves_that_of_the_runs_own(run, tmp_path):
    other = ("--data", "{kind: cluttered_digits, split: eval, count: 12, seed: 5}")
    own = ("--budgets", "1", "--examples", 6)
    assert acmc("eval", run, *own).exit_code == 0
    before = (run / "eval.json").read_bytes()
    for budget in (".6", "1"):
        done = acmc("eval", run, *other, "--budgets", budget)
        assert done.exit_code == 0 and "eval-cluttered_digits-" in done.stderr, done.stderr
    (kept,) = run.glob("eval-*.json")
    assert [row.asked for row in load_evaluation(run, kept.name).budgets] == [0.6, 1.0]
    assert load_evaluation(run, kept.name).n == 12 and (run / "eval.json").read_bytes() == before
    # the run's own data by name are its own
    same = ("--data", "{kind: cluttered_digits, split: eval, count: 48, seed: 2}")
    assert acmc("eval", run, *same, "--budgets", ".6", "--examples", 6).exit_code == 0
    assert asked(run) == [0.6, 1.0] and len(list(run.glob("eval-*.json"))) == 1
    save(load(run), run)  # the folder is still ours


def test_an_evaluation_goes_where_it_is_asked_to(run, tmp_path):
    done = acmc("eval", run, "--budgets", "1", "--examples", 4, "--out", tmp_path / "here.json")
    assert done.exit_code == 0 and load_evaluation(run) is None and load_evaluation(tmp_path, "here.json").n == 4
    for place in (tmp_path / "no/such.json", tmp_path):
        done = acmc("eval", run, "--out", place)
        assert done.exit_code == 2 and "--out" in done.stderr
    done = acmc("report", run, "--out", tmp_path / "page")
    assert done.exit_code == 0 and (tmp_path / "page/index.html").is_file() and not (run / "report").exists()


def test_rows_that_know_the_dense_model_are_not_replaced_by_such_as_do_not(found):
    dense = found.metric.dense
    blind = dataclasses.replace(found.budgets[0], difference=None)
    recorded = dataclasses.replace(found.metric, dense_from="recorded")
    whole = joined(found, dataclasses.replace(found, metric=recorded, budgets=(blind,)))
    assert whole.budgets == tuple(sorted(found.budgets, key=lambda row: row.asked)) and whole.metric == found.metric
    other = dataclasses.replace(found.metric, dense=dense + 0.01)
    assert joined(found, dataclasses.replace(found, metric=other)) is None
    assert joined(found, dataclasses.replace(found, n=found.n + 1)) is None
    assert joined(found, dataclasses.replace(found, dense_macs=1.1 * found.dense_macs)) is None


def test_functions_that_a_folder_names_are_not_imported(run):
    (run / "recipe.yaml").write_text(RECIPE.replace("{kind: classify}", "{kind: 'python:antigravity:fly'}"))
    for verb in ("eval", "report"):
        done = acmc(verb, run)
        assert done.exit_code == 2 and "--allow-code" in done.stderr
    assert "antigravity" not in sys.modules


def test_where_the_dense_model_cannot_be_built_its_recorded_metric_is_shown(run):
    evaluation = acmc("eval", run, "--budgets", "1", "--examples", 8, "--json")
    recorded = json.loads(evaluation.stdout)["metric"]["dense"]
    (run / "recipe.yaml").write_text(RECIPE.replace("name: digits_vit}", "name: another}"))
    done = acmc("eval", run, "--budgets", "1", "--examples", 8, "--json")
    assert done.exit_code == 0, done.stderr
    metric = json.loads(done.stdout)["metric"]
    assert (metric["dense"], metric["dense_from"]) == (recorded, "recorded")
    assert json.loads(done.stdout)["budgets"][0]["difference"] is None
    assert "not compared" in done.stderr


def test_a_dense_model_with_other_weights_is_not_compared_with(run, monkeypatch):
    def build_another(config, **options):
        built = build(config, **options)
        built.model.encoder.layers[0].mlp[0].weight.data.mul_(2)
        return built

    monkeypatch.setattr("acm_compiler.runs.opened.build", build_another)
    done = acmc("eval", run, "--budgets", "1", "--examples", 8, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["metric"]["dense"] is None
    assert "other weights" in done.stderr


def test_report_writes_the_page_and_measures_first_where_nothing_was(run):
    done = acmc("report", run, "--json")
    assert done.exit_code == 0, done.stderr
    assert load_evaluation(run).n == 48
    page = (run / "report" / "index.html").read_text()
    assert json.loads(done.stdout)["page"] == str(run / "report" / "index.html")
    for words in (
        "little_digits",
        "half a &lt; b",
        "48 examples",
        "load map of example 6",
        "Object against background",
    ):
        assert words in page


def test_a_folder_without_a_model_is_named(tmp_path):
    for verb in ("eval", "report"):
        missing = acmc(verb, tmp_path / "gone")
        assert str(tmp_path / "gone") in missing.stderr and missing.exit_code == 2
        assert acmc(verb, tmp_path).exit_code == 1


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path, found):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PackageMissing, match="acm_compiler\\[viz\\]"):
        write_report(tmp_path / "report", Report(title="x", evaluation=found, plan=conversion(picture_model()).plan))
    assert not (tmp_path / "report").exists()


def test_a_report_leaves_load_maps_out_and_says_why(tmp_path, found):
    plan = conversion(picture_model()).plan
    why = "the model does not see"
    page = write_report(tmp_path, Report(title="x", evaluation=found, plan=plan, loads=Loads(missing=why))).read_text()
    assert f"There are no load maps in this report: {why}." in page
    assert not list(tmp_path.glob("load_maps.*"))


def test_a_report_without_a_dense_model_or_budgets_still_stands(tmp_path):
    model = picture_model()
    found = evaluate(model, [picture_batch(8)], TASK, budgets=[FixedK(1), FixedK(4)])
    page = write_report(tmp_path, Report(title="x", evaluation=found, plan=conversion(model).plan)).read_text()
    assert "Not measured: the dense regions are not kept" in page
    assert found.budgets == () and not list(tmp_path.glob("learners_per_site.*"))


def test_load_maps_show_which_patches_ran_how_many_learners():
    model = picture_model()
    maps = find_load_maps(model, picture_batch(9), TASK, [OPEN])
    assert maps.sites == maps.of_sites == 2
    # the first three labels come first, each picture's one bright patch runs all four learners
    for example, shares in enumerate(maps.loads[OPEN]):
        assert shares.flatten().tolist() == [1.0 if patch == example else 0.25 for patch in range(9)]
    assert maps.scale == (0.25, 1.0)


def test_models_without_pictures_have_no_load_maps():
    model = picture_model()
    assert find_load_maps(model, {"x": torch.zeros(2, 5)}, TASK, [OPEN]) is None
    for acm in model.acms:
        conversion(model).plan = dataclasses.replace(
            conversion(model).plan,
            sites=tuple(dataclasses.replace(site, layout=None) for site in conversion(model).plan.sites),
        )
        acm.conversion = conversion(model)
    assert find_load_maps(model, picture_batch(4) | {"image": torch.zeros(4, 1, 12, 13)}, TASK, [OPEN]) is None


def test_a_load_map_shows_loads_and_nothing_of_the_picture():
    batch = picture_batch(9)
    batch["image"] += 0.2 * torch.rand(batch["image"].shape)  # as bright as pictures are, here and there
    model = picture_model()
    maps = find_load_maps(model, batch, TASK, [OPEN])
    colours = load_colours(maps, OPEN, 0).flatten(0, 1)
    low, high = (torch.tensor(load_scale()(end)[:3]).float() for end in (0.0, 1.0))
    assert torch.equal(colours[0], high) and all(torch.equal(colour, low) for colour in colours[1:])
    # gates that give every token the same k: one colour, whatever the picture shows
    for acm in model.acms:
        torch.nn.init.zeros_(acm.gate.outer.weight)
    uniform = find_load_maps(model, batch, TASK, [OPEN])
    assert uniform.loads[OPEN].unique().tolist() == [0.25] and uniform.scale[0] < uniform.scale[1]
    with Image.open(io.BytesIO(picture_png(load_colours(uniform, OPEN, 0)))) as shown:
        assert len(shown.getcolors()) == 1


@pytest.mark.parametrize(
    ("budgets", "shown"),
    [
        ([0.25, 0.4, 1.0], [0.25, 0.4]),
        ([1.0], []),
        ([0.9, 0.1, 0.3, 0.5, 0.7, 1.0], [0.1, 0.3, 0.7, 0.9]),
    ],
)
def test_load_maps_are_shown_at_a_few_budgets_below_one(budgets, shown):
    assert spread(budgets) == shown


def test_load_maps_show_the_budget_that_the_model_is_set_to():
    measured = [0.1, 0.25, 0.4, 0.6, 0.75, 1.0]
    assert spread(measured, own=0.4) == [0.1, 0.4, 0.6, 0.75]
    assert spread(measured, own=0.25) == [0.1, 0.25, 0.6, 0.75]
    assert spread(measured, own=0.33) == spread(measured, own=None) == spread(measured, own=1.0)


def test_no_two_budgets_have_one_name(found):
    assert wording.budget_names([0.25, 0.5, 1.0]) == {0.25: "0.25", 0.5: "0.50", 1.0: "1.00"}
    near = tuple(dataclasses.replace(found.budgets[0], asked=asked) for asked in (0.251, 0.254, 0.6))
    close = dataclasses.replace(found, budgets=near)
    assert list(close.names.values()) == ["0.251", "0.254", "0.600"]
    titles = [axes.get_title() for axes in k_chart(close, LIGHT).axes]
    assert titles == ["budget 0.251", "budget 0.254", "budget 0.600"]
    assert [line.split()[0] for line in evaluation_table(close).splitlines()[2:5]] == ["0.251", "0.254", "0.600"]


def test_a_site_takes_one_line_of_the_chart_of_sites(found):
    sites = found.budgets[0].per_site
    many = tuple(dataclasses.replace(sites[0], name=f"site {i}") for i in range(40))
    heights = [
        k_chart(
            dataclasses.replace(found, budgets=(dataclasses.replace(found.budgets[0], per_site=shown),)), LIGHT
        ).get_size_inches()[1]
        for shown in (many[:20], many)
    ]
    assert heights[1] - heights[0] == pytest.approx(20 * 0.22)


def test_a_budget_that_is_asked_for_twice_is_measured_once():
    model = picture_model()
    plan = conversion(model).plan
    percent = f"{100 * plan.cost.macs(0.7) / plan.model.dense_macs:.9f}%"
    measured = evaluate(model, [picture_batch(4)], TASK, budgets=[0.7, percent, 0.7, FixedK(1), FixedK(1)])
    assert [row.asked for row in measured.budgets] == [0.7] and len(measured.fixed) == 1


@pytest.mark.parametrize(
    ("names", "start"),
    [
        (["layers.layer_0.mlp", "layers.layer_1.mlp"], "layers.layer_"),
        (["mlp.0", "mlp.1"], "mlp."),
        (["encoder.a", "encoder.ab"], "encoder."),
        (["left", "right"], ""),
        (["alone.mlp"], ""),
    ],
)
def test_what_all_site_names_start_with_is_written_once(names, start):
    assert shared_start(names) == start


def test_colours_mean_k_or_a_share_of_n():
    assert [label for label, _ in key_of_k([2, 2])] == ["k = 0", "k = 1", "k = 2"]
    assert [label for label, _ in key_of_k([2, 4])][:2] == ["k / N = 0.00", "k / N = 0.25"]
    assert len({colour for _, colour in key_of_k([4])}) == 5


def test_the_headline_is_the_cheapest_budget_close_to_dense(found):
    def budget(asked, metric):
        return dataclasses.replace(found.budgets[0], asked=asked, model_share=asked, metric=metric)

    def headline(*budgets, dense=0.9):
        metric = dataclasses.replace(found.metric, dense=dense)
        return headline_budget(dataclasses.replace(found, metric=metric, budgets=budgets)).asked

    assert headline(budget(0.25, 0.8), budget(0.4, 0.88), budget(0.6, 0.89)) == 0.4
    assert headline(budget(0.25, 0.5), budget(0.4, 0.6), budget(0.6, 0.55)) == 0.4
    assert headline(budget(0.25, 0.5), budget(0.4, 0.6), dense=None) == 0.4


def test_the_table_of_an_evaluation_is_that_of_the_golden_file(found):
    golden.check("eval.txt", evaluation_table(found) + "\n")


def test_the_table_names_missed_budgets_and_the_control(found):
    text = evaluation_table(found)
    assert "missed" not in text
    assert "4.000 ± 0.000, in MACs 4.000; k shuffled over patches" in text
    assert "to fixed k" in text.splitlines()[0] and f"to fixed k: {wording.CONTROL}" in text
    assert "36 examples from 9 sources" in text
    missed = dataclasses.replace(found.budgets[0], asked=0.3, expected=0.3, reached=0.325)
    assert "0.30 was missed by +0.025" in evaluation_table(dataclasses.replace(found, budgets=(missed,)))
    assert "to fixed k" not in evaluation_table(dataclasses.replace(found, fixed=()))


def test_a_budget_that_no_knob_reaches_is_told_from_one_that_was_missed(found):
    def table(**changes):
        changed = dataclasses.replace(found.budgets[0], **changes)
        return evaluation_table(dataclasses.replace(found, budgets=(changed,)))

    jump = table(asked=0.9, expected=0.712, reached=0.713)
    assert "budget 0.90: no knob of these gates leads there; the next below it spends 0.712" in jump
    assert "missed" not in jump
    assert "budget 0.71 was missed by -0.062" in table(asked=0.9, expected=0.712, reached=0.65)


def test_an_evaluation_from_before_examples_counted_by_their_length_is_read(found):
    before = found.as_json() | {"length": 0.41}
    assert Evaluation.from_json(json.dumps(before)) == found


def test_numbers_are_written_for_people():
    assert wording.percent(0.7136) == "71.4 %"
    accuracy, likelihood = (MetricResult(name=name, dense=None) for name in ("accuracy", "log_likelihood"))
    assert wording.score(0.9117, accuracy) == "91.2 %" and wording.score(-1.23456, likelihood) == "-1.235"
    assert wording.score(None, accuracy) == "-"
    assert wording.macs_of(0.797e6, 1.4e6) == "0.797 MMACs, dense 1.4 MMACs"
    assert wording.difference(Interval(mean=-0.008, low=-0.013, high=-0.003), accuracy) == "−0.8 ± 0.5"
    small = Interval(mean=-2.5e-5, low=-5e-5, high=0.0)
    assert wording.difference(small, likelihood) == "−2.5e-05 ± 2.5e-05"
    assert wording.signed(-2.5e-5, likelihood) == "−2.5e-05"
    assert wording.macs_spread(11.02e9, 9.8e9, 12.1e9) == "11.02 GMACs [9.80, 12.10]"
    assert wording.ratio(0.99948, 0.00032) == "0.9995 ± 0.0003"
    assert counted(1, "site") == "1 site" and counted(10800, "example") == "10,800 examples"
    assert counted(1, "batch") == "1 batch" and counted(2, "batch") == "2 batches"


def test_what_each_k_is_expected_to_do_is_shown_site_by_site(run):
    name = json.loads((run / "plan.json").read_text())["sites"][0]["name"]
    done = acmc("eval", run, "--budgets", "1", "--examples", 4, "--per-site")
    assert done.exit_code == 0, done.stderr
    assert name in done.stdout and "2.5e-01" in done.stdout
    document = json.loads(acmc("eval", run, "--budgets", "1", "--examples", 4, "--per-site", "--json").stdout)
    assert document["sensitivity"][name] == {"0": 0.5, "1": 0.25, "2": 0.125, "3": 0.0625, "4": 0.0}
    assert acmc("report", run).exit_code == 0
    assert "2.5e-01" in (run / "report" / "index.html").read_text()


def test_a_model_that_was_not_calibrated_has_no_expected_damages():
    assert "come from a calibrate phase" in damage_table({})
