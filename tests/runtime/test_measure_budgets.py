"""The measured table: budgets asked are budgets reached."""

import json

import pytest
import torch

from acm_compiler.errors import DataError, TrainingFailed
from acm_compiler.passes.rewrite.conversion import Conversion, conversion, plain_facts, restore_facts, rewritten, sites
from acm_compiler.runtime.budgets import NEAR
from acm_compiler.runtime.control import run_mode, set_budget
from acm_compiler.runtime.measure_budgets import measure_budgets
from acm_compiler.runtime.usage import record
from tests.helpers.build import planned_site, stack_of


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
    assert table.jumps == ()
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
        assert float(torch.cat(reached).mean()) == pytest.approx(budget, abs=2 * NEAR)


def test_only_real_tokens_have_to_be_finite(model):
    mask = torch.ones(16, 20, dtype=torch.bool)
    mask[:, 12:] = False
    data = [(torch.where(mask[..., None], x, torch.nan), mask) for x, _ in examples()]
    table = measure_budgets(model, data)
    assert table.points == measure_budgets(model, [(x.nan_to_num(), mask) for x, _ in data]).points
    with pytest.raises(TrainingFailed, match=r"^a: .*nan or infinity at 1 of 192 tokens of batch 3 of 4"):
        data[2][0][5, 3, 0] = torch.inf
        measure_budgets(model, data)
    assert conversion(model).table.points == table.points


def reached_on(model, data) -> float:
    with torch.no_grad(), record(model) as usage:
        for x, _ in data:
            model(x)
    return float(usage.shares.mean())


@pytest.mark.parametrize("rule", ["logits", "damage"])
def test_budgets_between_the_rows_are_reached_to_a_fiftieth(model, rule):
    data = examples()
    with torch.no_grad():
        for acm, scale in zip(sites(model).values(), (1, 0.05), strict=True):
            acm.gate.rule = rule
            acm.gate.outer.weight.mul_(scale)
    table = measure_budgets(model, data)
    for budget in torch.linspace(table.points[0].share, table.points[-1].share, 40).tolist():
        set_budget(model, budget)
        assert reached_on(model, data) == pytest.approx(budget, abs=0.02)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("rule", ["logits", "damage"])
def test_where_tokens_are_alike_what_a_budget_is_said_to_reach_is_reached_and_no_more_than_asked(model, rule, kinds):
    for acm in sites(model).values():
        acm.gate.rule = rule
    data = [(torch.randn(1, kinds, 8).repeat(4, 5, 1), None)]
    table = measure_budgets(model, data)
    assert table.jumps
    for budget in torch.linspace(table.points[0].share, 0.95, 17).tolist():
        said = set_budget(model, budget)
        assert said == pytest.approx(reached_on(model, data), abs=1e-6) and said <= budget + NEAR
    found = rewritten(model)
    kept = Conversion(plan=found.plan)
    restore_facts(kept, {}, json.loads(json.dumps(plain_facts(found))))
    assert kept.table == table


def test_where_tokens_are_alike_a_budget_gets_the_highest_share_below_it_that_there_is():
    model = stack_of(planned_site("a", learners=8, width=8))
    acm = sites(model)["a"]
    data = [(torch.randn(1, 1, 8).repeat(4, 5, 1), None)]
    measure_budgets(model, data)
    reachable = set()
    for knob in torch.linspace(-4, 4, 500).tolist():
        acm.set_choices(knob=knob, k_lo=0, k_hi=acm.count)
        reachable.add(reached_on(model, data))
    assert len(reachable) > 2
    for budget in torch.linspace(0, 0.99, 30).tolist():
        assert set_budget(model, budget) == pytest.approx(max(s for s in reachable if s <= budget + NEAR), abs=1e-6)


def test_measuring_leaves_mode_and_choices_alone(model):
    model.train()
    before = [run_mode(acm) for acm in sites(model).values()]
    measure_budgets(model, examples(1))
    assert model.training and [run_mode(acm) for acm in sites(model).values()] == before


def test_no_examples_is_an_error(model):
    with pytest.raises(DataError):
        measure_budgets(model, [])


def test_most_budgets_are_found_by_the_first_forward_that_looks_for_them(model):
    calls = []
    data = examples()
    with torch.no_grad():
        for acm in sites(model).values():
            acm.gate.rule = "damage"
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    table = measure_budgets(model, data, budgets=(0.33,))
    handle.remove()
    assert len(calls) <= 14 * len(data) and len(table.points) >= 12
    measured = sum(point.measured for point in table.points) * len(data)
    assert len(calls) - len(data) <= measured <= len(calls)  # the strongest knob's row may give way to a weaker one's


def unlike_batches(count=30):
    """Batches whose tokens are the larger the later, so that gates spend other shares on each."""
    return [(torch.randn(8, 12, 8) * (0.2 + 3 * number / count), None) for number in range(count)]


def test_some_of_many_batches_tell_what_all_would_spend(model):
    for acm in sites(model).values():
        acm.gate.rule = "damage"
    data, calls = unlike_batches(), []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    table = measure_budgets(model, data, budgets=(0.2, 0.33, 0.6))
    handle.remove()
    probes = sum(point.measured for point in table.points)
    assert table.examples == 240 and probes > 6
    assert len(calls) < 0.75 * probes * len(data) + 2 * len(data)
    for budget in (0.2, 0.33, 0.6):
        set_budget(model, budget)
        assert reached_on(model, data) == pytest.approx(budget, abs=NEAR + 3 * 0.0015)


class _WithHead(torch.nn.Module):
    """A model that does something after its last ACM, and calls the first one `more` times."""

    def __init__(self, body, more=0):
        super().__init__()
        self.body, self.head, self.more = body, torch.nn.Linear(8, 3), more

    def forward(self, x):
        for _ in range(self.more):
            x = self.body.acms[0](x)
        return self.head(self.body(x))


@pytest.mark.parametrize("more", [0, 2])
def test_what_follows_the_last_acm_is_run_for_the_first_knob_alone(model, more):
    data, heads = examples(), []
    whole = _WithHead(model, more).eval()
    whole.head.register_forward_hook(lambda *_: heads.append(1))
    measure_budgets(whole, data)
    assert len(heads) == len(data)
    for budget in (0.25, 0.6):
        set_budget(whole, budget)
        assert reached_on(whole, data) == pytest.approx(budget, abs=0.01)
