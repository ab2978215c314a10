"""Counters in eager, compiled and exported models."""

import copy
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import acm_compiler as acm
from acm_compiler.errors import NothingRecorded, NotRewritten
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, conversion
from acm_compiler.runtime.meter import TOLERANCE
from tests.helpers.build import planned_site, stack_of
from tests.helpers.rewrite_cases import ALL, give_budgets, rewritten

POINTS = (BudgetPoint(share=0.1, knob=1.0, k_lo=0), BudgetPoint(share=0.9, knob=-1.0, k_lo=0))


@pytest.fixture
def model():
    made = stack_of(planned_site("a"), planned_site("b", k_min=1))
    conversion(made).table = BudgetTable(rule="logits", points=POINTS, examples=1)
    acm.set_budget(made, 0.5)
    return made.eval()


def inputs(model, batch=3):
    width = next(iter(acm.sites(model).values())).d_in
    return torch.randn(batch, 5, width, generator=torch.Generator().manual_seed(1))


def recorded(model, x, **said):
    """Tokens by k at each site, as `acm.record` sees them."""
    with torch.no_grad(), acm.batch(model, **said), acm.record(model, macs=False) as usage:
        model(x)
    counts = {site.name: site.learners + 1 for site in conversion(model).plan.sites}
    return {name: torch.bincount(k[k >= 0], minlength=counts[name]) for name, k in usage.k.items()}, usage


def assert_counts(meter, expected):
    assert list(meter.k) == list(expected)
    assert all(torch.equal(meter.k[name], expected[name]) for name in expected)


def test_it_counts_what_a_record_sees(model):
    x = inputs(model)
    expected, usage = recorded(model, x)
    meter = acm.meter(model)
    with torch.no_grad():
        model(x)
    assert_counts(meter, expected)
    assert meter.share == pytest.approx(usage.pooled_budget)
    assert meter.tokens == 30 and meter.mean_k["a"] == pytest.approx(usage.k["a"].float().mean().item())
    assert "share" in str(meter) and "k = 0" in str(meter)


def test_padding_is_left_out_where_the_mask_is_known(model):
    x, mask = inputs(model), torch.arange(5) < torch.tensor([[5], [2], [1]])
    expected, _ = recorded(model, x, mask=mask)
    meter = acm.meter(model)
    with torch.no_grad(), acm.batch(model, mask=mask):
        model(x)
    assert_counts(meter, expected)
    assert meter.tokens == 16


def test_budgets_per_example_count_too(model):
    x = inputs(model)
    expected, _ = recorded(model, x, budgets=[0.2, 0.9, 1.0])
    meter = acm.meter(model)
    with torch.no_grad(), acm.batch(model, budgets=[0.2, 0.9, 1.0]):
        model(x)
    assert_counts(meter, expected)


def test_calls_add_up_until_reset_and_stop(model):
    x = inputs(model)
    with torch.no_grad(), acm.meter(model) as meter:
        model(x)
        model(x)
        assert meter.tokens == 60
        meter.reset()
        assert meter.tokens == 0 and str(meter) == "meter: no token counted yet"
        with pytest.raises(NothingRecorded):
            _ = meter.share
        model(x)
    model(x)
    assert meter.tokens == 30
    assert all(site.counts is None for site in acm.sites(model).values())


@pytest.mark.filterwarnings("ignore")  # of Dynamo
def test_a_compiled_model_counts_without_compiling_again_for_other_budgets(model):
    x = inputs(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="acm", fullgraph=True)
    with torch.no_grad():
        plain = compiled(x)
        meter = acm.meter(compiled)
        torch.testing.assert_close(compiled(x), plain)
        for budget in (0.5, 0.2, 1.0):
            acm.set_budget(model, budget)
            expected, _ = recorded(model, x)
            meter.reset()
            with torch.compiler.set_stance("fail_on_recompile"):
                compiled(x)
            assert_counts(meter, expected)


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_counts_by_itself(tmp_path):
    _, x, model = rewritten(ALL["post_norm"], init="random")
    plan = give_budgets(model).plan
    acm.set_budget(model, 0.5)
    expected, usage = recorded(model, x)
    live = acm.meter(model)
    with torch.no_grad():
        model(x)
        file = acm.export(model, tmp_path / "out", x)
        program = torch.export.load(file).module()
        assert_counts(live, expected)  # what the export runs to compare is not the model's use
        meter = acm.meter(program, plan=plan)
        assert meter.tokens == 0
        program(x, budget=torch.tensor(0.5))
    assert_counts(meter, expected)
    assert meter.share == pytest.approx(usage.pooled_budget) and meter.promised is None


def test_a_module_without_counters_is_refused(model):
    with pytest.raises(NotRewritten, match="holds no counters"):
        acm.meter(torch.nn.Linear(2, 2), plan=conversion(model).plan)


def test_a_share_off_the_promise_is_warned_of(model):
    acm.set_budget(model, 0.5)
    with torch.no_grad(), acm.meter(model) as meter:
        model(inputs(model))
        assert meter.promised == pytest.approx(0.5) and meter.drift == pytest.approx(meter.share - 0.5)
        assert abs(meter.drift) > TOLERANCE  # a table that nobody measured
        with pytest.warns(UserWarning, match="recalibrate"):
            assert not meter.check()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert meter.check(tolerance=1.0)


def test_nothing_is_promised_where_k_is_fixed_or_no_budget_set(model):
    meter = acm.meter(model)
    with torch.no_grad():
        model(inputs(model))
    acm.set_k(model, 1)
    assert meter.promised is None and meter.drift is None and meter.check()
    acm.set_budget(model, 0.5, cap=0.5)
    assert meter.promised is None


@pytest.mark.parametrize("copied", [False, True])
def test_counters_are_not_saved_nor_in_the_state(copied, tmp_path):
    original, x, model = rewritten(ALL["post_norm"], init="random")
    give_budgets(model)
    acm.set_budget(model, None)
    before = list(model.state_dict())
    acm.meter(model)
    assert list(model.state_dict()) == before
    acm.save(copy.deepcopy(model) if copied else model, tmp_path / "metered")
    loaded = acm.load(tmp_path / "metered", base_model=original)
    assert all(site.counts is None for site in acm.sites(loaded).values())
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


def test_a_recomputed_forward_counts_once(model):
    x = inputs(model).requires_grad_()
    meter = acm.meter(model)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert meter.tokens == 30


def test_inference_mode_and_vmap_are_no_obstacle(model):
    x = inputs(model)
    meter = acm.meter(model)
    with torch.inference_mode():
        model(x)
    assert meter.tokens == 30
    with torch.no_grad():
        torch.func.vmap(model)(x[:, None])
    meter.reset()
    assert meter.tokens == 0
