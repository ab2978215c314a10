import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

import acm_compiler as acm
from acm_compiler.errors import BudgetUnreachable, DataError, NoBudgetTable, StorageError, UsageError
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.evaluate import evaluate, every_k
from acm_compiler.evaluation.places import Grid, grid_of
from acm_compiler.evaluation.results import Evaluation, MetricResult, load_evaluation, save_evaluation
from acm_compiler.evaluation.statistics import Sample, Spent, against_fixed, resampled_means
from acm_compiler.evaluation.tally import ForegroundTally
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, conversion, sites
from acm_compiler.planning.cost import dense_macs_per_token, gate_macs_per_token, macs_per_learner
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.control import FixedK, run_mode, set_budget, set_k
from acm_compiler.runtime.usage import record
from acm_compiler.tasks import Task
from tests.helpers.build import plan_of, planned_site, stack_of
from tests.helpers.models import hf_wav2vec2
from tests.helpers.pictures import DENSE_MACS, OPEN, PATCH, TASK, TOKENS, picture_batch, picture_model

EVERY_KEY = {"asked", "reached", "metric", "model_share", "macs_mean", "macs_p5", "macs_p95"}


class TokenTask(Task):
    """True if the mean of the real tokens' outputs is positive."""

    metric = "sign"

    def inputs(self, batch):
        return batch["x"]

    def mask(self, batch):
        return batch["mask"]

    def score(self, output, batch):
        return (output.mean((1, 2)) > 0).float()


@pytest.fixture
def model():
    return picture_model()


def test_the_json_has_the_documented_names_and_survives_a_round_trip(model):
    found = evaluate(model, [picture_batch(12)], TASK, budgets=[0.4, 1.0, FixedK(2)], dense=copy.deepcopy(model))
    document = json.loads(json.dumps(found.as_json()))
    assert document["schema"] == 1
    assert {"name", "dense"} <= set(document["metric"])
    assert all(set(row) >= EVERY_KEY for row in document["budgets"])
    assert [row["asked"] for row in document["budgets"]] == [0.4, 1.0]
    assert Evaluation.from_json(json.dumps(document)) == found


def test_a_fixed_k_costs_what_arithmetic_says_for_every_example(model):
    result = evaluate(model, [picture_batch(6)], TASK, budgets=[FixedK(3)]).fixed[0]
    site = conversion(model).plan.sites[0]
    kept = conversion(model).plan.cost.fixed_macs
    expected = kept + 2 * TOKENS * (gate_macs_per_token(site) + 3 * macs_per_learner(site))
    assert result.reached == result.pooled == 0.75
    assert result.macs_mean == result.macs_p5 == result.macs_p95 == expected
    assert result.model_share == expected / DENSE_MACS
    assert result.per_site[0].tokens_by_k == (0, 0, 0, 6 * TOKENS, 0)


def test_gates_are_charged_for_the_learners_they_chose(model):
    result = evaluate(model, [picture_batch(9)], TASK, budgets=[OPEN]).budgets[0]
    assert result.reached == pytest.approx(OPEN) and result.pooled == pytest.approx(OPEN)
    assert all(site.tokens_by_k == (0, 9 * 9, 0, 0, 9) for site in result.per_site)
    assert all(site.share == pytest.approx(OPEN) for site in result.per_site)


def choose_by_sign(acm):
    """The gate of `acm` gives 4 learners to tokens whose first entry is positive, and 1 to all others."""
    for parameter in acm.gate.parameters():
        torch.nn.init.zeros_(parameter)
    acm.gate.inner.weight.data[0, 0] = 100.0
    acm.gate.outer.weight.data[4, 0] = 1.0
    acm.gate.outer.bias.data[1] = 0.1


def test_the_reached_budget_is_a_mean_over_examples_and_the_pooled_one_over_tokens():
    model = stack_of(planned_site("by_sign"), planned_site("always_two", width=16))
    choose_by_sign(model.acms[0])
    choose_by_sign(model.acms[1])
    model.acms[1].gate.outer.bias.data[2] = 1e6
    points = (BudgetPoint(share=0.1, knob=0.0, k_lo=0), BudgetPoint(share=1.0, knob=-9.0, k_lo=0))
    conversion(model).table = BudgetTable(rule="logits", points=points, examples=1)
    batch = {"x": torch.ones(3, 5, 8), "mask": torch.ones(3, 5)}
    batch["x"][1] = -1.0
    batch["mask"][1, 1:] = 0
    batch["mask"][2] = 0  # padding alone: no part of either
    found = evaluate(model, [batch], TokenTask(), budgets=[0.1])
    result = found.budgets[0]
    # one learner of the second site costs twice one of the first: shares (4 + 2 * 2) / 12 and (1 + 2 * 2) / 12
    assert found.masked
    assert result.reached == pytest.approx((8 / 12 + 5 / 12) / 2)
    assert result.pooled == pytest.approx((5 * 8 + 1 * 5) / (6 * 12))
    assert result.per_site[0].tokens_by_k == (0, 1, 0, 0, 5), "padding counts nowhere"


def test_an_example_of_padding_alone_has_no_part_in_the_macs_either():
    model = stack_of(planned_site("only"))
    batch = {"x": torch.ones(3, 5, 8), "mask": torch.ones(3, 5)}
    batch["mask"][2] = 0
    usages, results = [], []
    for rows in (2, 3):
        part = {name: values[:rows] for name, values in batch.items()}
        with torch.no_grad(), batch_context(model, mask=part["mask"]), record(model) as usage:
            model(part["x"])
        usages.append(usage)
        results.append(evaluate(model, [part], TokenTask(), budgets=[FixedK(2)]))
    assert str(usages[0]) == str(usages[1]), "means per example"
    assert results[0].dense_macs == results[1].dense_macs > 0
    real, together = (result.fixed[0] for result in results)
    for name in ("reached", "model_share", "macs_mean", "macs_p5", "macs_p95"):
        assert getattr(together, name) == pytest.approx(getattr(real, name))


def test_the_model_comes_back_as_it_was(model):
    set_budget(model, 0.4)
    before = {name: run_mode(acm) for name, acm in sites(model).items()}
    model.train()
    evaluate(model, [picture_batch(6)], TASK, budgets=[0.5, FixedK(1)], dense=copy.deepcopy(model))
    assert {name: run_mode(acm) for name, acm in sites(model).items()} == before
    assert model.training and conversion(model).budget == 0.4
    assert all(acm.tap is None for acm in sites(model).values())


def test_the_model_comes_back_as_it_was_after_a_failure(model):
    def batches():
        yield picture_batch(6)
        raise DataError("a broken picture")

    set_budget(model, 0.4)
    before = {name: run_mode(acm) for name, acm in sites(model).items()}
    with pytest.raises(DataError):
        evaluate(model, batches(), TASK, budgets=[0.5])
    assert {name: run_mode(acm) for name, acm in sites(model).items()} == before
    assert all(acm.tap is None for acm in sites(model).values())


def test_a_budget_out_of_reach_is_refused_before_any_data_is_read(model):
    def batches():
        raise AssertionError("data was read")
        yield

    with pytest.raises(BudgetUnreachable):
        evaluate(model, batches(), TASK, budgets=[0.5, 1.5])
    conversion(model).table = None
    with pytest.raises(NoBudgetTable):
        evaluate(model, batches(), TASK, budgets=[0.5])


def test_examples_that_the_model_does_not_take_are_refused_with_its_own_words(model):
    batch = picture_batch(6)
    wrong = {**batch, "image": batch["image"][..., :1]}
    words = r"the model itself raises on a batch of float32 .*found \w+Error[\s\S]*name the model's arguments"
    for dense in (None, copy.deepcopy(model)):
        with pytest.raises(UsageError, match=words):
            evaluate(model, [wrong], TASK, budgets=[0.5], dense=dense)


def test_arguments_without_names_are_refused_and_the_words_show_how_they_are_named(model):
    image, other = picture_batch(6)["image"], torch.zeros(6)
    for batch in ((image, other, other), ((image, other), other)):
        with pytest.raises(DataError, match=r"by their names: {'x': x, 'other': y, 'label': label}"):
            evaluate(model, [batch], TASK, budgets=[0.5])


def test_no_examples_are_refused(model):
    with pytest.raises(DataError):
        evaluate(model, [], TASK, budgets=[0.5])


def test_a_model_is_not_compared_with_itself(model):
    for same in (model, torch.nn.Sequential(model)):
        with pytest.raises(UsageError, match="dense must be the model before conversion, got one with the same ACMs"):
            evaluate(model, [picture_batch(6)], TASK, budgets=[0.5], dense=same)


def test_a_model_differs_from_itself_by_nothing(model):
    twin = copy.deepcopy(model)
    set_k(twin, 4)
    found = evaluate(model, [picture_batch(12)], TASK, budgets=[1.0], dense=twin)
    assert found.metric.dense == found.budgets[0].metric and found.metric.dense_from == "original"
    assert (found.budgets[0].difference.low, found.budgets[0].difference.high) == (0.0, 0.0)


def test_dense_regions_answer_for_the_dense_model_while_they_are_kept():
    model = picture_model(dense=True)
    batch = picture_batch(12)
    expected = copy.deepcopy(model)
    expected.acms = torch.nn.ModuleList(acm.dense for acm in model.acms)
    found = evaluate(model, [batch], TASK, budgets=[1.0])
    assert found.metric.dense_from == "regions"
    assert found.metric.dense == float(TASK.score(expected(batch["image"]), batch).double().mean())


def test_without_dense_regions_nothing_is_compared():
    found = evaluate(picture_model(), [picture_batch(12)], TASK, budgets=[1.0])
    assert found.metric.dense is None and found.metric.dense_from is None and found.budgets[0].difference is None


def test_gates_that_follow_brightness_show_in_the_foreground_ratio_and_vanish_when_shuffled(model):
    found = evaluate(model, [picture_batch(180)], TASK, budgets=[OPEN, FixedK(2)])
    use = found.budgets[0].foreground
    assert (use.on, use.off, use.ratio, use.ratio_error, use.examples) == (4, 1, 4, 0, 180)
    assert 0 < abs(use.shuffled - 1) < 4 * use.shuffled_error < 0.5
    fixed = found.fixed[0].foreground
    assert (fixed.on, fixed.off, fixed.ratio, fixed.ratio_error, fixed.shuffled) == (2, 2, 1, 0, 1)
    assert found.budgets[0].per_site[0].foreground_ratio == 4


def test_in_macs_a_site_counts_for_what_its_learners_cost():
    sites = [planned_site("cheap", tokens=TOKENS), planned_site("dear", tokens=TOKENS, width=32)]
    tally = ForegroundTally(plan_of(*sites), seed=0)
    mask = picture_batch(4)["foreground"]
    on_BS = F.pad(mask[:, ::PATCH, ::PATCH].flatten(1), (1, 0))
    tally.add({"cheap": torch.full_like(on_BS, 2, dtype=torch.int32), "dear": torch.where(on_BS, 4, 1).int()}, mask)
    use = tally.result(torch.arange(4))
    cheap, dear = (macs_per_learner(site) for site in sites)
    assert dear > cheap and use.ratio == 6 / 3
    assert use.macs == pytest.approx((2 * cheap + 4 * dear) / (2 * cheap + dear))


def test_a_budget_is_held_against_fixed_k_of_the_same_share():
    score_KE = torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.float64)
    fixed = [Spent(share=k / 4, score_E=score_E) for k, score_E in enumerate(score_KE, start=1)]
    sample = sample_of(torch.arange(4))
    gates = Spent(share=0.375, score_E=torch.tensor([1.0, 1, 0, 1]))
    found = against_fixed(gates, [fixed[2], fixed[0], fixed[1]], sample)
    assert found.mean == pytest.approx(0.75 - 0.125) and found.low < found.mean < found.high
    same = against_fixed(Spent(share=0.5, score_E=score_KE[1]), fixed, sample)
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    for share in (0.2, 1.0):
        assert against_fixed(dataclasses.replace(gates, share=share), fixed, sample) is None
    assert against_fixed(gates, [], sample) is None


def test_gates_are_compared_with_the_fixed_k_of_the_same_run(model):
    settings = [OPEN, FixedK(1), FixedK(2)]
    found = evaluate(model, [picture_batch(36)], TASK, budgets=settings)
    part = (found.budgets[0].reached - 0.25) / 0.25
    one, two = (result.metric for result in found.fixed)
    assert 0 < part < 1
    assert found.budgets[0].over_fixed.mean == pytest.approx(found.budgets[0].metric - (1 - part) * one - part * two)
    assert evaluate(model, [picture_batch(36)], TASK, budgets=[OPEN]).budgets[0].over_fixed is None


def test_budget_1_and_every_learner_of_all_tokens_are_run_once(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(run_mode(next(iter(sites(model).values())))))
    found = evaluate(model, [picture_batch(6)], TASK, budgets=[OPEN, 1.0, FixedK(2), FixedK(4)])
    assert len(calls) == 3 and calls[1] == FixedK(4)
    budget, most = found.budgets[1], found.fixed[1]
    assert (budget.asked, budget.expected, most.k) == (1.0, 1.0, 4)
    assert budget.per_site == most.per_site and budget.metric == most.metric and budget.macs_mean == most.macs_mean
    assert found.fixed[0].per_site[0].tokens_by_k == (0, 0, 6 * TOKENS, 0, 0)


def test_every_example_costs_what_its_own_length_costs():
    acm = stack_of(planned_site("a", tokens=5))
    site = conversion(acm).plan.sites[0]
    batch = {"x": torch.randn(2, 4, 8), "mask": torch.tensor([[True] * 4, [True, False, False, False]])}
    found = evaluate(acm, [batch], TokenTask(), budgets=[FixedK(1)])
    per_token = gate_macs_per_token(site) + macs_per_learner(site)
    assert found.dense_macs == 2.5 * dense_macs_per_token(site)
    assert found.fixed[0].macs_mean == pytest.approx(2.5 * per_token)
    assert found.fixed[0].macs_p95 == pytest.approx((1 + 0.95 * 3) * per_token)
    assert found.fixed[0].model_share == pytest.approx(per_token / dense_macs_per_token(site))


def test_a_mask_of_samples_is_read_as_the_call_reads_it():
    original, _ = hf_wav2vec2()
    original.config.feat_extract_norm = "layer"  # whose models are given a mask
    x = {
        "input_values": torch.randn(2, 400),
        "attention_mask": (torch.arange(400) < torch.tensor([[400], [250]])).long(),
    }
    converted = acm.rewrite(original.eval(), acm.plan(original, x, sites="mlp"))
    acm.calibrate(converted, [x] * 8, tokens=400, budgets=[0.5])
    found = acm.evaluate(converted, [x], budgets=[0.5], metric=lambda output, batch: output.logits.mean((1, 2)))
    acm.set_budget(converted, 0.5)
    with torch.no_grad(), acm.record(converted) as usage:
        converted(**x)
    assert found.masked and usage.masked
    assert found.budgets[0].reached == pytest.approx(float(usage.shares.mean()))


def test_pictures_that_are_all_foreground_count_in_no_ratio(model):
    batch = picture_batch(8)
    batch["foreground"] = torch.ones_like(batch["foreground"])
    assert evaluate(model, [batch], TASK, budgets=[OPEN]).budgets[0].foreground is None
    batch["foreground"][:3, :4] = False
    assert evaluate(model, [batch], TASK, budgets=[OPEN]).budgets[0].foreground.examples == 3


def sample_of(groups: torch.Tensor, units: torch.Tensor | None = None, task=TASK) -> Sample:
    return Sample(task=task, units_E=torch.ones(len(groups)) if units is None else units, groups_E=groups)


class Perplexity(Task):
    """Total loss over total tokens, and e to the power of that."""

    metric, lower_is_better = "perplexity", True

    def units(self, batch):
        return batch["tokens"]

    def scale(self, mean):
        return mean.exp()


def test_a_metric_may_be_a_ratio_of_totals_and_its_power():
    score, tokens = torch.tensor([3.0, 1.0, 0.0, 4.0]), torch.tensor([2.0, 1.0, 0.0, 5.0])
    sample = sample_of(torch.arange(4), tokens, Perplexity())
    assert sample.value(score) == pytest.approx(2.718281828)
    assert sample.value(2 * score) == pytest.approx(2.718281828**2)
    found = sample.difference(2 * score, score)
    assert found.mean == pytest.approx(2.718281828**2 - 2.718281828)
    assert found.low < found.mean < found.high
    assert sample.error(torch.full((4,), 2.0) * tokens) == pytest.approx(0.0, abs=1e-9)


def test_perplexities_too_large_for_a_number_have_no_interval_of_nans():
    """e^800 is infinite in float64."""
    sample = sample_of(torch.arange(4), torch.ones(4), Perplexity())
    huge, usual = torch.full((4,), 800.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert sample.value(huge) == sample.error(huge) == torch.inf and sample.error(usual) < torch.inf
    metric = MetricResult(name="perplexity", dense=None, lower_is_better=True)
    found = sample.difference(huge, usual)
    assert (found.mean, found.low, found.high) == (torch.inf,) * 3 and wording.difference(found, metric) == "+inf"
    assert wording.difference(sample.difference(huge, huge), metric) == "-"
    some = sample.difference(torch.tensor([1.0, 2.0, 3.0, 3000.0]), usual)
    assert some.low < some.high == torch.inf


def test_examples_of_one_source_count_as_one_draw():
    values = torch.tensor([0.0, 1.0]).repeat(50)
    alone = sample_of(torch.arange(100)).error(values)
    repeated = sample_of(torch.arange(100).repeat_interleave(4)).error(values.repeat_interleave(4))
    independent = sample_of(torch.arange(400)).error(values.repeat_interleave(4))
    assert repeated == pytest.approx(alone, rel=0.1)
    assert independent == pytest.approx(alone / 2, rel=0.1)
    assert alone == pytest.approx(0.05, rel=0.1)


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(200):
        a = (torch.rand(300, generator=torch.Generator().manual_seed(seed)) < 0.7).float()
        b = (torch.rand(300, generator=torch.Generator().manual_seed(seed + 1000)) < 0.6).float()
        found = sample_of(torch.arange(300)).difference(a, b, draws=200)
        hits += found.low <= 0.1 <= found.high
    assert 0.89 <= hits / 200 <= 0.99


def test_groups_of_different_sizes_are_weighted_by_their_examples():
    values = torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    means = resampled_means(values, torch.tensor([7, 7, 7, 9]))
    assert set(means[:, 0].tolist()) == {0.0, 0.75, 1.0}


@pytest.mark.parametrize(
    ("tokens", "size", "grid"),
    [
        (197, (224, 224), Grid(extra=1, side=14)),
        (196, (224, 224), Grid(extra=0, side=14)),
        (198, (224, 224), Grid(extra=2, side=14)),
        (37, (36, 36), Grid(extra=1, side=6)),
        (50, (224, 256), None),
        (48, (224, 224), None),
        (1, (224, 224), None),
        (128, (224, 224), None),
    ],
)
def test_tokens_are_placed_only_where_their_number_tells_how(tokens, size, grid):
    assert grid_of(tokens, *size) == grid


def test_every_k_is_what_the_sites_can_run():
    assert [setting.k for setting in every_k(picture_model())] == [0, 1, 2, 3, 4]
    model = stack_of(planned_site(k_min=1))
    assert [setting.k for setting in every_k(model)] == [1, 2, 3, 4]
    model.acms[0].state = "dense"
    assert every_k(model) == ()


def test_an_evaluation_is_kept_and_a_broken_one_refused(tmp_path):
    assert load_evaluation(tmp_path) is None
    found = evaluate(picture_model(), [picture_batch(12)], TASK, budgets=[1.0, FixedK(1)])
    path = save_evaluation(tmp_path, found)
    assert load_evaluation(tmp_path) == found
    assert [file.name for file in tmp_path.iterdir()] == ["eval.json"]
    path.write_text('{"schema": 1}')
    with pytest.raises(StorageError, match="metric"):
        load_evaluation(tmp_path)
    path.write_text('{"schema": 2}')
    with pytest.raises(StorageError, match="schema 2"):
        load_evaluation(tmp_path)
    path.write_text("half a fi")
    with pytest.raises(StorageError, match="acmc eval"):
        load_evaluation(tmp_path)


def test_an_evaluation_that_cannot_be_written_leaves_nothing(tmp_path):
    found = evaluate(picture_model(), [picture_batch(12)], TASK, budgets=[1.0])
    (tmp_path / "eval.json").mkdir()
    with pytest.raises(StorageError):
        save_evaluation(tmp_path, found)
    assert [file.name for file in tmp_path.iterdir()] == ["eval.json"]


def test_versions_name_python_and_torch(model):
    found = evaluate(model, [picture_batch(2)], TASK, budgets=[1.0])
    assert {"python", "torch"} <= set(found.versions)
