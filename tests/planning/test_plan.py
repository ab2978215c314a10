"""Plans, their JSON, and what they cost by arithmetic."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import acm_compiler
from acm_compiler.errors import PlanMismatch, StorageError
from acm_compiler.planning.cost import site_cost
from acm_compiler.planning.plan import Plan, check_fits, fingerprint
from acm_compiler.site import Skip
from tests.helpers.build import acm_for, plan_of, planned_site

VARIANTS = [
    {},
    {"kind": "gated_mlp", "k_min": 1},
    {"second_layer": "per_k"},
    {"second_layer": "shared_top"},
    {"kind": "linear", "dense_width": None, "last": None, "learner_act": "identity", "k_min": 1},
    {"kind": "linear", "dense_width": None, "last": None, "learner_act": "identity", "k_min": 1, "lossless": True},
    {"kind": "linear", "dense_width": None, "last": None, "learner_act": "gelu", "k_min": 1, "init": "random"},
    {"learners": 3, "width": 11, "calls": 2},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_parameters_charged_are_parameters_built(changes):
    site = planned_site(**changes)
    acm = acm_for(site)
    assert site_cost(site).acm_params == sum(p.numel() for p in acm.parameters())


@pytest.mark.parametrize("changes", VARIANTS)
def test_learners_charged_are_learners_executed(changes):
    """FlopCounterMode on the reference at every k equals the cost report (2 FLOPs per MAC)."""
    from torch.utils.flop_counter import FlopCounterMode

    from acm_compiler.acm.reference import run_learners

    site = planned_site(**changes)
    acm, x = acm_for(site), torch.randn(site.tokens, 8)
    for k in range(site.k_min, site.learners + (0 if site.has_top else 1)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run_learners(x, torch.full((site.tokens,), k), acm.learners.weights())
        charged = site_cost(site).learner_macs * k // site.learners // site.calls
        assert counter.get_total_flops() == 2 * charged
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        acm.gate(x)
    assert counter.get_total_flops() == 2 * site_cost(site).gate_macs // site.calls


def test_a_plan_survives_json():
    plan = plan_of(*(planned_site(f"s{i}", **changes) for i, changes in enumerate(VARIANTS)))
    plan = Plan(
        model=dataclasses.replace(
            plan.model, dense_macs=17_582_740_224
        ),  # a ViT-B/16's: far more than sizes of tensors
        sites=plan.sites,
        skipped=(Skip(name="x", reason="packed projection", macs=3, source="m.py:3"),),
        kept=(Skip(name="conv", reason="convolution", macs=9),),
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan
    document = json.loads(plan.to_json())
    assert document["schema"] == 1 and document["budget_range"][1] == 1
    assert document["totals"]["learner_macs"] == sum(site["learner_macs"] for site in document["sites"])
    wanted = {"name", "kind", "role", "d_in", "d_out", "dense_width", "learners", "width", "k_min", "residual", "calls"}
    wanted |= {"tokens", "gate_width", "dense_macs", "learner_macs", "gate_macs", "dense_params", "acm_params"}
    assert wanted <= set(document["sites"][0])
    assert {"fingerprint", "class", "source"} <= set(document["model"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "model": {}}'])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(StorageError):
        Plan.from_json(text)


def test_the_fingerprint_is_structure_not_values():
    one, two, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4).half(), torch.nn.Linear(4, 4)
    assert fingerprint(one) == fingerprint(two) != fingerprint(other)
    with pytest.raises(PlanMismatch, match="plan again"):
        check_fits(plan_of(planned_site()), one)


def test_a_model_without_products_has_a_report_too():
    """Plan a model as torch's dynamic quantisation leaves it: its linears are operators of their own."""
    plan = acm_compiler.plan(nn.Sequential(nn.LayerNorm(8)), torch.randn(2, 8))
    assert "kept" in str(plan)
    assert plan.cost.model_share(0.5) == 1
    assert Plan.from_json(plan.to_json()) == plan


def test_the_report_of_a_batch_is_of_one_example():
    one = plan_of(planned_site(), dense_macs=10**6)
    five = plan_of(planned_site(tokens=5 * planned_site().tokens), dense_macs=5 * 10**6, batch=5)
    shown = ("mlp", "kept", "total")
    rows = [[r.split() for r in str(plan).splitlines() if r.startswith(shown)] for plan in (one, five)]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    assert "MACs of one example" in str(five) and "MACs of one example" not in str(one)


def test_the_report_says_which_budgets_calibrate_may_take_away():
    linear = {"kind": "linear", "dense_width": None, "last": None, "learner_act": "identity", "k_min": 1}
    assert "calibrate keeps them within reach where they are asked for" in str(plan_of(planned_site()))
    assert "budgets below 0.250 let tokens run no learner: cal" in str(
        plan_of(planned_site(), planned_site("other", **linear))
    )
    assert "run no learner\n" in str(plan_of(planned_site(init="random")))
    assert "budgets below" not in str(plan_of(planned_site(**linear)))


def test_budgets_are_not_shares_of_the_model():
    site = planned_site()
    plan = plan_of(site, dense_macs=2 * site_cost(site).dense_macs)
    cost = plan.cost
    assert cost.budget_min == 0.0
    assert cost.model_share(1.0) == pytest.approx(1 + cost.gate_macs / plan.model.dense_macs)
    assert cost.model_share(0.5) == pytest.approx(0.75 + cost.gate_macs / plan.model.dense_macs)
    assert cost.budget_of_macs(cost.macs(0.37)) == pytest.approx(0.37)
