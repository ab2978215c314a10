"""The measured table: budgets asked are budgets reached."""

import pytest
import torch

from acm_compiler.control import run_mode, set_budget
from acm_compiler.conversion import conversion, sites
from acm_compiler.errors import DataError
from acm_compiler.measure import TOLERANCE, measure_budgets
from acm_compiler.usage import record
from tests.build import planned_site, stack_of


@pytest.fixture
def model():
    made = stack_of(planned_site("a"), planned_site("b", k_min=1, width=12, residual=False))
    with torch.no_grad():
        for acm in sites(made).values():
            acm.gate.outer.weight.mul_(10)
    return made


def examples(count=4):
    return [(torch.randn(16, 20, 8), None) for _ in range(count)]


@pytest.mark.parametrize("rule", ["logits", "damage"])
def test_every_budget_is_reached_on_the_data_it_was_measured_on(model, rule):
    for acm in sites(model).values():
        acm.gate.rule = rule
    data = examples()
    table = measure_budgets(model, data, budgets=(0.33,))
    assert table.rule == rule and table.examples == 64
    shares = [point.share for point in table.points]
    knobs = [point.knob for point in table.points]
    assert shares == sorted(shares) and knobs == sorted(knobs, reverse=True)
    least = conversion(model).plan.cost.budget_min
    assert least <= shares[0] < least + 0.01
    for budget in (0.2, 0.33, 0.6):
        set_budget(model, budget)
        reached = []
        for x, _ in data:
            with torch.no_grad(), record(model) as usage:
                model(x)
            reached.append(usage.shares)
        assert float(torch.cat(reached).mean()) == pytest.approx(budget, abs=2 * TOLERANCE)


def test_measuring_leaves_mode_and_choices_alone(model):
    model.train()
    before = [run_mode(acm) for acm in sites(model).values()]
    measure_budgets(model, examples(1))
    assert model.training and [run_mode(acm) for acm in sites(model).values()] == before


def test_no_examples_is_an_error(model):
    with pytest.raises(DataError):
        measure_budgets(model, [])
