"""The controls made of our own learners: what they cost, and between two k a part of each."""

from types import SimpleNamespace

import pytest
import torch

from acm_compiler.baselines.acms import Shuffled, Static, in_percent
from acm_compiler.baselines.method import BatchResult
from tests.helpers.build import plan_of, planned_site


def static(costs):
    """The control with scores and MACs of `10 * k` and `k`, and the k that it ran."""
    method, ran = Static.__new__(Static), []
    method.costs = costs

    def at(batch, k):
        ran.append(k)
        return BatchResult(torch.full((2,), 10.0 * k), torch.full((2,), float(k)))

    method._at = at
    return method, ran


def test_between_two_costs_each_k_counts_for_its_part():
    method, ran = static([(1, 0.2), (2, 0.4), (4, 0.8)])
    found = method.run({}, 0.5)
    assert ran == [2, 4]
    assert found.score_B.tolist() == pytest.approx([25.0, 25.0]) and found.macs_B.tolist() == pytest.approx([2.5, 2.5])


def test_from_the_highest_cost_on_all_learners_run():
    method, ran = static([(1, 0.2), (4, 0.8)])
    assert method.run({}, 0.9).score_B.tolist() == [40.0, 40.0] and ran == [4]
    assert method.reaches(0.2) and not method.reaches(0.19)


def test_the_floor_is_no_gate_and_no_learner():
    plan = plan_of(planned_site(k_min=0), dense_macs=10**6)
    assert Static.floor(None, plan) == pytest.approx(plan.cost.fixed_macs / 10**6)
    assert Static.floor(None, plan) < Shuffled.floor(None, plan) <= 1


def test_the_random_control_deals_the_choices_of_real_tokens_only():
    method = Shuffled.__new__(Shuffled)
    method.drawn, method._dealing, method._kept = torch.Generator().manual_seed(0), False, {}
    chosen, mask = torch.arange(40, dtype=torch.int32), torch.arange(40) >= 10
    acm = SimpleNamespace(name="mlp", choose=lambda x, shape, said=None: chosen, mask_of=lambda shape: mask)
    instead = method._instead(acm)
    assert instead(None, torch.Size([40])) is chosen
    method._dealing = True
    dealt = instead(None, torch.Size([40]))
    assert torch.equal(dealt[:10], chosen[:10]) and torch.equal(chosen, torch.arange(40, dtype=torch.int32))
    assert not torch.equal(dealt, chosen) and torch.equal(dealt.sort().values, chosen)
    assert not method._kept["mlp"]


def test_a_budget_is_written_as_a_share_of_the_dense_model():
    assert (in_percent(0.6), in_percent(0.123456789), in_percent(1)) == ("60%", "12.3457%", "100%")
