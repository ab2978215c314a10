"""What a plan says of the sites that it leaves dense: how much they are, and what converting them would buy."""

import json

import pytest
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.advice import advise
from acm_compiler.cli import app
from acm_compiler.recipe.schema import GateConfig, SiteRule
from acm_compiler.survey import look
from tests import models


def block() -> tuple:
    """A model reference of attention and MLP in one block."""
    return models.Stack(models.Parallel()), models.example()


def advice_for(*rules: SiteRule):
    return advise(look(*block()), rules, GateConfig())


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
    result = CliRunner().invoke(app, ["plan", "python:tests.test_advice:block", "--sites", "mlp", *words])
    assert result.exit_code == 0, result.output
    if words:
        (advice,) = json.loads(result.stdout)["advice"]
        assert (advice["match"], advice["sites"]) == ("attn", 4)
    else:
        assert "advice: also converting attn (4 more sites, " in result.stdout


def test_sites_are_included_and_excluded_from_the_command_line_as_in_python():
    words = ["--sites", "mlp,attn", "--include", "re:(q|o){1,2}$,*.k", "--exclude", "attn.q"]
    result = CliRunner().invoke(app, ["plan", "python:tests.test_advice:block", *words, "--json"])
    assert result.exit_code == 0, result.output
    found = [site["name"] for site in json.loads(result.stdout)["sites"]]
    made = acm.plan(*block(), include=("re:(q|o){1,2}$", "*.k"), exclude="attn.q")
    assert found == [site.name for site in made.sites]
    assert [name.rpartition(".")[2] for name in found] == ["k", "o"]


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_a_pattern_that_matches_nothing_is_refused_wherever_it_stands(option):
    result = CliRunner().invoke(app, ["plan", "python:tests.test_advice:block", option, "blocks.7"])
    assert result.exit_code == 2 and "no site matches 'blocks.7'" in result.stderr and "nearest: " in result.stderr
