"""Knobs at which gates turn, and the share that their scores let expect."""

import numpy as np
import pytest
import torch

from acm_compiler.acm.reference import choice_costs, choose_k, utilities
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.runtime.trials import (
    STRONGEST_KNOB,
    Part,
    Probe,
    Whole,
    corners,
    expected_between,
    quantiles,
    turning_knobs,
)
from acm_compiler.runtime.usage import record
from tests.helpers.build import planned_site, stack_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("k_min", [0, 1])
@pytest.mark.parametrize("rule", ["logits", "damage"])
def test_between_turning_knobs_a_token_runs_what_its_gate_chooses(rule, k_min):
    learners = 5
    cost_C = choice_costs(0.7, k_min=k_min, n_learners=learners, device=CPU)
    score_TC = 4 * torch.randn(400, len(cost_C), dtype=torch.float64)
    turning_Tn = turning_knobs(score_TC, cost_C, rule)
    assert (turning_Tn[:, 1:] <= turning_Tn[:, :-1]).all()
    for knob in torch.linspace(-12, 12, 97, dtype=torch.float64):
        utility_TC = utilities(score_TC, knob, cost_C, rule)
        k_T = choose_k(utility_TC, torch.tensor(0), torch.tensor(learners), k_min)
        assert torch.equal(k_T, (k_min + (turning_Tn > knob).sum(1)).int())


def test_where_fewer_learners_do_no_more_damage_no_knob_leads_to_more():
    cost_C = choice_costs(1.0, k_min=0, n_learners=2, device=CPU)
    turning_Tn = turning_knobs(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), cost_C, "damage")
    assert turning_Tn[1].tolist() == [-STRONGEST_KNOB, -STRONGEST_KNOB] and (turning_Tn[0] > -5).all()


def test_scores_of_any_size_have_turning_knobs_and_those_that_are_not_finite_have_none():
    cost_C = choice_costs(1.0, k_min=1, n_learners=3, device=CPU)
    rows = [[900, 890, 880], [-900, -910, -920], [0, torch.nan, 0], [0, -torch.inf, 0]]
    score_TC = torch.tensor(rows, dtype=torch.float32)
    turning_Tn = turning_knobs(score_TC, cost_C, "damage")
    assert turning_Tn[:2].isfinite().all() and turning_Tn[2:].isnan().all()
    assert torch.allclose(turning_Tn[0] - turning_Tn[1], torch.full((2,), 1800.0, dtype=torch.float64))


def test_quantiles_weigh_knobs():
    knobs = quantiles([(torch.zeros(100, dtype=torch.float64), 3.0), (torch.ones(100, dtype=torch.float64), 1.0)])
    assert float((knobs < 0.5).double().mean()) == pytest.approx(0.75, abs=0.01)


def test_one_forward_tells_the_share_of_every_knob_where_no_site_stands_before_another():
    model = stack_of(planned_site("a", learners=6, width=8))
    acm = sites(model)["a"]
    with torch.no_grad():
        acm.gate.outer.weight.mul_(10)
    x = torch.randn(16, 20, 8)
    turning = turning_knobs(acm.gate(x.flatten(0, 1)), acm.choice_costs(CPU), acm.gate.rule)
    found = {}
    for knob in np.linspace(-2, 2, 21):
        acm.set_choices(knob=float(knob), k_lo=0, k_hi=acm.count)
        with torch.no_grad(), record(model) as usage:
            model(x)
        found[float(knob)] = usage.budget
    probe = Probe(knob=0.0, share=found[0.0], turning=quantiles([(turning.flatten(), 1.0)]).numpy(), least=0.0)
    assert probe.expected(np.array([0.0]))[0] == found[0.0]
    assert np.abs(probe.expected(np.array(list(found))) - list(found.values())).max() < 0.01
    assert max(found.values()) - min(found.values()) > 0.2


def test_what_is_expected_between_two_probes_falls_and_agrees_with_both():
    turning = np.linspace(-1, 1, 101)
    low = Probe(knob=-1.0, share=0.9, turning=turning, least=0.0)
    high = Probe(knob=1.0, share=0.2, turning=turning + 0.4, least=0.0)
    knobs, shares, apart = expected_between(low, high)
    assert (np.diff(knobs) > 0).all() and (np.diff(shares) <= 0).all()
    assert (shares[0], shares[-1]) == (0.9, 0.2) and 0.3 < np.interp(0.0, knobs, shares) < 0.8
    assert apart == pytest.approx(max(abs(high.expected(knobs) - low.expected(knobs))))


def test_a_line_through_the_corners_of_a_curve_misses_it_by_no_more_than_allowed():
    knobs = np.concatenate([[-4096.0], np.linspace(-3, 3, 200)])
    shares = 1 / (1 + np.exp(4 * knobs).clip(max=1e9))
    found = corners(knobs, shares, 0.01)
    places = sorted([0, *found, len(knobs) - 1])
    assert abs(np.interp(knobs, knobs[places], shares[places]) - shares).max() <= 0.01
    assert len(set(found)) == len(found) < 20
    line = np.interp(knobs, knobs[[0, -1]], shares[[0, -1]])
    assert found[0] == abs(line - shares).argmax()
    assert corners(knobs, knobs * 0.0, 0.0) == []


def part(share, *, tokens=100, examples=4):
    """A batch whose tokens turn evenly between the knobs 0 and 2 share."""
    knobs = torch.linspace(0, 2 * share, tokens, dtype=torch.float64)
    shares = torch.full((examples,), share, dtype=torch.float64)
    return Part(shares=shares, tokens=tokens, run=tokens, turning=[(knobs, 1.0)])


def test_batches_are_expected_to_differ_as_they_did():
    whole = Whole({0: part(0.2, examples=1), 1: part(0.4), 2: part(0.0, examples=0)}, knob=0.1, least=0.0)
    expected = whole.expected(0.2)
    assert expected == {0: pytest.approx(-0.05, abs=3e-3), 1: pytest.approx(0.275, abs=3e-3)}
    assert whole.of_examples(expected).tolist() == [expected[0], *[expected[1]] * 4]
    assert whole.expected(0.1) == {0: pytest.approx(0.2), 1: pytest.approx(0.4)}


def test_a_part_is_enough_once_it_errs_alike_everywhere():
    shares = [0.2 + 0.02 * number for number in range(30)]
    whole = Whole({number: part(share) for number, share in enumerate(shares)}, knob=0.1, least=0.0)
    expected = whole.expected(0.1)
    assert whole.order[:3] == [0, 3, 6] and sorted(whole.order) == list(range(30))
    first = whole.order[:15]
    beyond = {number: part(shares[number] - 0.05) for number in first}  # as far from what was expected in all
    assert whole.is_known_by(beyond, expected)
    assert not whole.is_known_by(dict(list(beyond.items())[:3]), expected)
    assert not whole.is_known_by({number: part(0.3, tokens=10) for number in first}, expected)
    assert not whole.is_known_by({number: part(0.3) for number in first}, expected)
    assert whole.is_known_by({number: part(0.3) for number in range(30)}, expected)
