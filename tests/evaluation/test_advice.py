"""Advice on sites that a plan leaves dense: how much they are, and what converting them would buy."""

import json

import pytest
import torch
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.evaluation.advice import advise, advise_lossless
from acm_compiler.evaluation.results import Evaluation, FixedResult, Interval, MetricResult
from acm_compiler.passes.survey import analyze
from acm_compiler.recipe.phases import CalibratePhase, DistillPhase
from acm_compiler.recipe.schema import GateConfig, SiteRule
from acm_compiler.runs.pipeline import decide
from tests.helpers import models
from tests.helpers.build import plan_of, planned_site, sliced_site


def block() -> tuple:
    """A model reference of attention and MLP in one block."""
    return models.Stack(models.Parallel()), models.example()


def advice_for(*rules: SiteRule):
    found = analyze(*block())
    return advise(found, decide(found, rules, GateConfig()), rules, GateConfig())


def test_advice_names_the_class_left_dense_and_what_it_would_buy():
    (advice,) = advice_for(SiteRule(match=("mlp",)))
    assert (advice.match, advice.sites) == ("attn", 4)
    now, both = acm.plan(*block(), sites="mlp").cost, acm.plan(*block()).cost
    assert advice.macs_share == 10 * 4 * models.WIDTH**2 / now.plan.model.dense_macs
    assert advice.model_share_now == now.model_share(now.budget_min)
    assert advice.model_share == both.model_share(both.budget_min) < advice.model_share_now
    assert str(advice).startswith("also converting attn (4 more sites, ")


def test_nothing_is_advised_where_everything_is_converted():
    assert advice_for(SiteRule(match=("mlp", "attn"))) == []


def test_sites_left_out_of_a_class_are_counted_alone():
    (advice,) = advice_for(SiteRule(match=("mlp", "attn"), exclude=("attn.q", "attn.k")))
    assert (advice.match, advice.sites) == ("attn", 2)


@pytest.mark.parametrize("words", [["--json"], []])
def test_acmc_plan_prints_the_advice(words):
    result = CliRunner().invoke(app, ["plan", "python:tests.evaluation.test_advice:block", "--sites", "mlp", *words])
    assert result.exit_code == 0, result.output
    if words:
        (advice,) = json.loads(result.stdout)["advice"]
        assert (advice["match"], advice["sites"]) == ("attn", 4)
    else:
        assert "advice: also converting attn (4 more sites, " in result.stdout


def test_sites_are_included_and_excluded_from_the_command_line_as_in_python():
    words = ["--sites", "mlp,attn", "--include", "re:(q|o){1,2}$,*.k", "--exclude", "attn.q"]
    result = CliRunner().invoke(app, ["plan", "python:tests.evaluation.test_advice:block", *words, "--json"])
    assert result.exit_code == 0, result.output
    found = [site["name"] for site in json.loads(result.stdout)["sites"]]
    made = acm.plan(*block(), include=("re:(q|o){1,2}$", "*.k"), exclude="attn.q")
    assert found == [site.name for site in made.sites]
    assert [name.rpartition(".")[2] for name in found] == ["k", "o"]


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_a_pattern_that_matches_nothing_is_refused_wherever_it_stands(option):
    result = CliRunner().invoke(app, ["plan", "python:tests.evaluation.test_advice:block", option, "blocks.7"])
    assert result.exit_code == 2 and "no site matches 'blocks.7'" in result.stderr and "nearest: " in result.stderr


@pytest.mark.parametrize(
    ("rule", "place", "what"),
    [
        ("{match: blocks.7}", "4:17", "no site matches 'blocks.7'"),
        ("{match: [mlp, blocks.7]}", "4:23", "no site matches 'blocks.7'"),
        ("{match: mlp, exclude: blocks.7}", "4:31", "no site matches 'blocks.7'"),
        ("{match: blocks.0.mlp, form: svd}", "4:17", "form is for projections"),
    ],
)
def test_a_recipes_pattern_that_matches_nothing_is_refused_at_its_place(tmp_path, rule, place, what):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"acm: 1\nname: small\nmodel: {{source: python, name: 'tests.evaluation.test_advice:block'}}\nsites: [{rule}]\n"
    )
    result = CliRunner().invoke(app, ["plan", str(recipe)])
    assert result.exit_code == 2 and f"r.yaml:{place}: {what}" in result.stderr, result.stderr


def evaluated(low: float, high: float, *, k: int = 4, lower_is_better: bool = False) -> Evaluation:
    """An evaluation whose difference to dense at `k` has that interval."""
    common = {"reached": 1.0, "pooled": 1.0, "metric": 0.9, "metric_error": 0.01, "model_share": 1.0}
    macs = {"macs_mean": 1.0, "macs_p5": 1.0, "macs_p95": 1.0}
    at_k = FixedResult(k=k, difference=Interval(mean=(low + high) / 2, low=low, high=high), **common, **macs)
    at_1 = FixedResult(k=1, difference=Interval(mean=-0.5, low=-0.6, high=-0.4), **common, **macs)
    metric = MetricResult(name="accuracy", dense=0.91, dense_from="original", lower_is_better=lower_is_better)
    return Evaluation(
        metric=metric, budgets=(), fixed=(at_k, at_1), n=9, groups=9, masked=False, model="M", dense_macs=1.0, date=""
    )


CALIBRATED = (CalibratePhase(phase="calibrate"),)


def test_a_loss_at_all_learners_points_to_lossless():
    plan = plan_of(planned_site("a"), planned_site("b", second_layer="shared_top"))
    told = advise_lossless(evaluated(-0.02, -0.01), plan, CALIBRATED)
    assert "(k = 4) the accuracy is −1.5 ± 0.5 points to the dense model: 1 of 2 sites" in told
    assert "`lossless: true`" in told
    assert advise_lossless(evaluated(0.01, 0.02, lower_is_better=True), plan, CALIBRATED)


@pytest.mark.parametrize("interval", [(-0.02, 0.01), (0.01, 0.02)])
def test_no_loss_needs_no_advice(interval):
    assert advise_lossless(evaluated(*interval), plan_of(planned_site("a")), CALIBRATED) is None


def test_what_lossless_could_not_mend_is_not_blamed_on_the_calibration():
    exact = plan_of(planned_site("a", second_layer="per_k"), sliced_site("b"))
    assert advise_lossless(evaluated(-0.02, -0.01), exact, CALIBRATED) is None
    trained = (*CALIBRATED, DistillPhase(phase="distill", steps=1, batch=1))
    assert advise_lossless(evaluated(-0.02, -0.01), plan_of(planned_site("a")), trained) is None


@pytest.mark.parametrize("lossless", [False, True])
def test_sites_that_keep_answers_do_so_after_calibration(lossless):
    model, x = models.Stack(models.Parallel()).eval(), models.example()
    dense, converted = model(x), acm.rewrite(model, acm.plan(model, x, lossless=lossless))
    plan = acm.calibrate(converted, [models.example() for _ in range(40)], tokens=300)
    acm.set_k(converted, 4)
    assert {site.keeps_answers for site in plan.sites if site.kind != "linear"} == {lossless}
    keeps = all(site.keeps_answers for site in plan.sites)
    assert torch.allclose(converted(x), dense, atol=1e-4) == keeps == lossless
