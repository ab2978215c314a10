"""Sites that a recipe's target keeps dense, by expected and measured times; what plans and advice say of it."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from acm_compiler.evaluation.advice import advise
from acm_compiler.passes.survey import analyze
from acm_compiler.planning.site_times import DEVICES, MeasuredTime
from acm_compiler.planning.target import Target, plan_sites_for
from acm_compiler.recipe.schema import GateConfig, SiteRule, TargetConfig
from acm_compiler.runs.pipeline import decide
from tests.helpers.build import planned_site
from tests.helpers.small_vit import small_vit

RULES = [SiteRule(match=("mlp",)), SiteRule(match=("attn",))]
VIT = {"d_in": 768, "d_out": 768, "dense_width": 3072, "width": 768, "gate_width": 64}


def target_of(batch: int | None, share: float = 0.5, **measured) -> Target:
    return replace(Target.of(TargetConfig(device="h200", batch=batch), share), measured=measured.get("times", {}))


def test_recipes_know_the_devices_of_the_table():
    assert get_args(TargetConfig.model_fields["device"].annotation) == tuple(DEVICES)


def test_a_site_is_slower_for_one_image_and_not_for_many():
    site = planned_site("mlp", **VIT, tokens=2 * 197)
    (reason,) = target_of(1).slower([site], examples=2).values()
    assert reason.startswith("slower as an ACM on H200 at budget 0.5, batch 1: 1.") and reason.endswith("expected")
    assert target_of(128).slower([site], examples=2) == {}
    many = replace(site, tokens=128 * 197)
    assert target_of(None).slower([many], examples=128) == {} != target_of(1).slower([many], examples=128)


def test_measured_times_take_the_place_of_expected_ones():
    site = planned_site("mlp", **VIT, tokens=128)
    key = (site.learner_form, site.d_in, site.width, site.d_out, site.learners, 128)
    fast = MeasuredTime(dense_s=1.0, acm_s=((0.5, 0.6),))
    assert target_of(1, times={key: fast}).slower([site], examples=1) == {}
    slow = target_of(1, times={key: replace(fast, acm_s=((0.5, 1.25),))})
    assert slow.slower([site], examples=1)["mlp"].endswith("1.25 of the dense time, measured")


@pytest.fixture(scope="module")
def found():
    return analyze(small_vit(), torch.randn(1, 3, 12, 12))


def test_a_plan_says_what_stays_dense_for_its_target_and_why(found):
    free = decide(found, RULES, GateConfig())
    made = decide(found, RULES, GateConfig(), target=target_of(1))
    assert len(free.sites) and not made.sites and len(made.skipped) == len(free.skipped) + len(free.sites)
    assert sum(skip.reason.startswith("slower as an ACM on H200") for skip in made.skipped) == len(free.sites)
    assert f"note: {len(free.sites)} sites would be slower as ACMs on H200 at budget 0.5, batch 1" in str(made)
    assert advise(found, made, RULES, GateConfig()) == []
    assert decide(found, RULES, GateConfig(), target=None) == free


def test_a_slice_whose_partner_stays_dense_does_so_too(found, monkeypatch):
    rules = {site.name: SiteRule(match=(site.name,), form="slices") for site in found.sites if site.pair}
    assert rules
    first = next(iter(rules))

    def slower(self, planned, examples):
        return {site.name: "slow" for site in planned if site.name == first}

    monkeypatch.setattr(Target, "slower", slower)
    planned, kept = plan_sites_for(target_of(1), found.sites, rules, GateConfig(), examples=1)
    partner = {site.name: site.pair for site in found.sites}[first].partner
    assert kept[first] == "slow" and kept[partner] == f"its partner {first} stays dense"
    assert {site.name for site in planned} == rules.keys() - {first, partner}
