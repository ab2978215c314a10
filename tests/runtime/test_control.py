"""Budgets at run time: fixed k, the table, caps, per-example budgets, recording."""

import copy
import dataclasses
import math
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import acm_compiler.runtime.batch_context as batches
from acm_compiler.acm.context import batch_of, observers_of
from acm_compiler.acm.module import RUN_TIME
from acm_compiler.calibration.calibrate import calibrate
from acm_compiler.calibration.recalibrate import recalibrate
from acm_compiler.errors import (
    BudgetUnreachable,
    CompiledModelError,
    LayoutUnknown,
    NoBudgetTable,
    NothingRecorded,
    NotRewritten,
    SitesNotFitted,
    UsageError,
)
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, conversion, sites
from acm_compiler.planning.call_times import CallTime, CallTimes, device_name
from acm_compiler.planning.cost import gate_macs_per_token, macs_per_learner
from acm_compiler.runtime.budgets import parse_budget, setting_of
from acm_compiler.runtime.control import FixedK, Gated, Relaxed, relax, run_mode, set_budget, set_k
from acm_compiler.runtime.site_status import status
from acm_compiler.runtime.usage import record
from tests.helpers.build import planned_site, stack_of
from tests.helpers.decoders import gated
from tests.helpers.models import WIDTH, Flattened, Mlp, Residual

TABLE = BudgetTable(
    rule="logits",
    points=(
        BudgetPoint(share=0.1, knob=4.0, k_lo=0),
        BudgetPoint(share=0.5, knob=1.0, k_lo=0),
        BudgetPoint(share=0.9, knob=-2.0, k_lo=1),
    ),
    examples=10,
)


@pytest.fixture
def model():
    made = stack_of(planned_site("a"), planned_site("b", k_min=1, learners=2, width=16))
    conversion(made).table = TABLE
    return made


def test_a_model_without_acms_is_named():
    with pytest.raises(NotRewritten, match="Linear"):
        sites(torch.nn.Linear(2, 2))


def test_two_rewritten_models_in_one_are_addressed_one_by_one(model):
    both = torch.nn.ModuleList([model, copy.deepcopy(model)])
    for act in (sites, status, lambda m: set_budget(m, 0.5), lambda m: record(m).__enter__()):
        with pytest.raises(UsageError, match="2 models that were rewritten one by one"):
            act(both)
    assert set_budget(both[0], 0.5) == 0.5


def test_a_budget_is_not_for_a_part_of_a_model(model):
    set_budget(model, 0.5)
    before = [run_mode(acm) for acm in sites(model).values()]
    part = model.acms[1]
    for act in (
        lambda: set_budget(part, 0.4),
        lambda: set_budget(part, 1.0),
        lambda: batches.batch(part, budgets=[0.4]).__enter__(),
        lambda: calibrate(part, [torch.randn(1, 5, 8)]),
        lambda: recalibrate(part, [torch.randn(1, 5, 8)]),
    ):
        with pytest.raises(UsageError, match="with 1 of its 2 sites, without a"):
            act()
    assert [run_mode(acm) for acm in sites(model).values()] == before
    # what only wraps the model holds all of it
    assert set_budget(torch.nn.Sequential(model), 0.4) == pytest.approx(0.4)


@pytest.mark.parametrize("budget", [0.5, {"prefill": 0.9, "decode": 0.3}])
def test_the_sites_of_a_part_may_be_given_a_k_and_handed_back(model, budget):
    set_budget(model, budget)
    before = [state_of(acm) for acm in model.acms]
    set_k(model.acms[0], 3)
    assert run_mode(model.acms[0]) == FixedK(3) and state_of(model.acms[1]) == before[1]
    set_k(model.acms[0], None)
    assert [state_of(acm) for acm in model.acms] == before and conversion(model).budget == budget


def state_of(acm) -> dict[str, int]:
    """The run-time choices of an ACM."""
    return {name: int(getattr(acm, name)) for name in RUN_TIME}


def test_set_k_is_clamped_to_each_site(model):
    set_k(model, 3)
    assert [run_mode(acm) for acm in sites(model).values()] == [FixedK(3), FixedK(2)]
    set_k(model, 0)
    assert [run_mode(acm) for acm in sites(model).values()] == [FixedK(0), FixedK(1)]


@pytest.mark.parametrize("k", [-1, 5, 2.0, True, "2"])
def test_set_k_refuses_what_no_site_has(model, k):
    with pytest.raises(UsageError, match="0 to 4"):
        set_k(model, k)


def test_the_gates_decide_again_at_the_last_budget(model):
    set_k(model, 2)
    set_k(model, None)
    assert run_mode(sites(model)["a"]) == Gated(0.0, 0, 4)
    set_budget(model, 0.3)
    set_k(model, 2)
    set_k(model, None)
    assert run_mode(sites(model)["a"]) == Gated(2.5, 0, 4)


def test_a_budget_between_two_rows_is_interpolated(model):
    assert set_budget(model, 0.7) == pytest.approx(0.7)
    assert run_mode(sites(model)["b"]) == Gated(-0.5, 1, 2)
    assert set_budget(model, 0.95) == pytest.approx(0.9)
    assert run_mode(sites(model)["a"]) == Gated(-2.0, 1, 4)
    assert set_budget(model, 1.0) == 1.0
    assert run_mode(sites(model)["a"]) == FixedK(4)


def test_a_cap_bounds_every_token(model):
    set_budget(model, 0.5, cap=0.5)
    assert [run_mode(acm) for acm in sites(model).values()] == [Gated(1.0, 0, 2), FixedK(1)]
    set_budget(model, 1.0, cap=0.5)
    assert [run_mode(acm) for acm in sites(model).values()] == [FixedK(2), FixedK(1)]


def test_a_cap_lowers_the_share_that_is_expected(model):
    assert set_budget(model, 0.4, cap=0.5) == pytest.approx(0.4)
    assert set_budget(model, 0.9, cap=0.5) == pytest.approx(0.5)
    assert set_budget(model, 0.9) == pytest.approx(0.9)


def test_a_cap_holds_until_another_budget_is_set(model):
    set_budget(model, 0.5, cap=0.5)
    set_k(model, 3)
    set_k(model, None)
    assert run_mode(sites(model)["a"]) == Gated(1.0, 0, 2)
    set_budget(model, 0.5)
    set_k(model, None)
    assert run_mode(sites(model)["a"]) == Gated(1.0, 0, 4)


@pytest.mark.parametrize("cap", [0, 1.5, float("nan"), "0.5", True])
def test_a_cap_is_a_share_of_the_learners(model, cap):
    with pytest.raises(UsageError, match=re.escape(repr(cap))):
        set_budget(model, 0.5, cap=cap)


def test_numbers_of_numpy_are_numbers(model):
    set_k(model, np.int64(2))
    assert run_mode(sites(model)["a"]) == FixedK(2)
    assert set_budget(model, np.float32(0.5), cap=np.float32(1)) == pytest.approx(0.5)


@pytest.mark.parametrize("budget", [0.05, 1.2, -1.0, float("nan")])
def test_unreachable_budgets_name_the_range(model, budget):
    with pytest.raises(BudgetUnreachable, match=r"0\.100 to 1") as error:
        set_budget(model, budget)
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("budget", "advice"),
    [
        (40, "did you mean '40%', of the whole model's MACs, or 0.4, of the learners'?"),
        (12, "did you mean 0.12, of the learners'?"),
        (9, "1 runs every learner"),
        ("40", "did you mean '40%'"),
        ("40 percent", "did you mean '40%'"),
        ("0.4", "a share is a number, without quotes: 0.4"),
        ("0,4", "without quotes: 0.4"),
        (2, "for 2 learners at every token: acm.set_k(model, 2)"),
        (1.5, "1 runs every learner"),
        (float("inf"), "a budget is a finite number"),
        (float("nan"), "a budget is a finite number"),
        ("900%", "1 runs every learner"),
        (-1, "0.100 is the least"),
        (0.0, "allow k = 0 where a residual bypasses"),
    ],
)
def test_advice_about_a_budget_that_cannot_be_fits_what_was_asked(model, budget, advice):
    with pytest.raises((BudgetUnreachable, UsageError)) as error:
        set_budget(model, budget)
    assert advice in str(error.value)
    assert ("convert more sites" in str(error.value)) == (budget == 0.0)


def test_the_least_share_that_is_said_to_be_in_reach_is(model):
    owner = conversion(model)
    first, *others = owner.table.points
    owner.table = dataclasses.replace(owner.table, points=(dataclasses.replace(first, share=0.1006), *others))
    with pytest.raises(BudgetUnreachable, match=r"expected 0\.101 to 1 ") as error:
        set_budget(model, 0.1)
    assert "0.100" not in str(error.value)
    set_budget(model, 0.101)


@pytest.mark.parametrize("share", [1 / 12, 0.10042, 0.1496])
def test_every_printed_end_of_a_range_is_accepted_when_it_is_typed(model, share):
    owner = conversion(model)
    first, *others = owner.table.points
    owner.table = dataclasses.replace(owner.table, points=(dataclasses.replace(first, share=share), *others))
    plan, said = owner.plan, str(status(model))
    low, high = re.search(r"range (\S+) to (\S+)\)", said).groups()
    percent = re.search(r"in reach: (\S+%) to (\S+%)", said).groups()
    kmacs = [f"{plan.cost.macs(end) / 1e3:.2f} kMACs" for end in (share, 1.0)]  # as the cost report has them
    for least in (float(low), float(f"{share:.3g}"), percent[0], kmacs[0]):
        assert set_budget(model, least) == pytest.approx(share, abs=1e-2)
        set_k(model, None)  # what was set can be set again
        assert share - 1e-6 <= owner.budget <= share + 1e-2
    for most in (float(high), 1.0004, percent[1], kmacs[1]):
        assert set_budget(model, most) == pytest.approx(1.0, abs=1e-2)
    for beyond in (share - 0.01, 1.01, f"{float(percent[0][:-1]) - 2:.0f}%"):
        with pytest.raises(BudgetUnreachable):
            set_budget(model, beyond)


def test_a_budget_that_only_calibration_put_out_of_reach_names_calibration(model):
    owner = conversion(model)
    points = tuple(dataclasses.replace(point, k_lo=1) for point in owner.table.points if point.share > 0.3)
    owner.table = dataclasses.replace(owner.table, points=points)
    with pytest.raises(BudgetUnreachable, match=r"acm\.calibrate\(model, batches, budgets=\[0\.45\]\)"):
        set_budget(model, 0.45)


def test_a_model_whose_gates_were_not_measured_names_the_remedy(model):
    conversion(model).table = None
    with pytest.raises(NoBudgetTable, match="calibrate"):
        set_budget(model, 0.5)
    set_budget(model, 1.0)
    with pytest.raises(NoBudgetTable):
        set_budget(model, None)


def test_a_model_without_a_budget_of_its_own_says_what_none_means(model):
    with pytest.raises(NoBudgetTable, match=r"default budget .*from 0\.100 to 1\)\n  name a budget"):
        set_budget(model, None)
    conversion(model).table = None
    with pytest.raises(NoBudgetTable, match=r"first acm\.calibrate"):
        set_budget(model, None)


def test_an_unreachable_budget_is_refused_in_the_unit_it_was_asked_in(model):
    plan = conversion(model).plan
    least, most = (plan.cost.model_share(share) for share in (0.1, 1.0))
    with pytest.raises(BudgetUnreachable) as error:
        set_budget(model, "900%")
    for end, bound in zip(("least", "most"), (least, most), strict=True):
        printed = re.search(r"expected (?P<least>[\d.]+)% to (?P<most>[\d.]+)%, gates included", str(error.value))
        assert printed and abs(float(printed[end]) / 100 - bound) < 1e-3
        set_budget(model, f"{printed[end]}%")  # what is said to be in reach is
    least, most = (plan.cost.macs(share) / 1e3 for share in (0.1, 1.0))
    with pytest.raises(BudgetUnreachable) as error:
        set_budget(model, "7 GMACs")
    assert "found 7 GMACs" in str(error.value)
    with pytest.raises(BudgetUnreachable) as error:
        set_budget(model, "0.001 kMACs")
    ends = re.search(r"expected ([\d.]+) kMACs to ([\d.]+) kMACs", str(error.value))
    assert ends and [float(end) for end in ends.groups()] == pytest.approx([least, most], rel=1e-3)
    for end in ends.groups():
        set_budget(model, f"{end} kMACs")
    with pytest.raises(UsageError, match="papers call GFLOPs"):
        set_budget(model, "11 GFLOPs")


def test_budgets_in_other_units_mean_the_whole_model(model):
    owner = conversion(model)
    cost = owner.plan.cost
    assert parse_budget("50%", owner.plan) == pytest.approx(
        (0.5 * owner.plan.model.dense_macs - cost.gate_macs) / cost.learner_macs
    )
    macs = cost.macs(0.4)
    assert parse_budget(f"{macs / 1e3} kMACs", owner.plan) == pytest.approx(0.4)
    assert parse_budget(f"{macs} MACs", owner.plan) == pytest.approx(0.4)
    for text in ("half", "50 percent", "", "1 GB", None, True):
        with pytest.raises(UsageError, match="cannot be read"):
            parse_budget(text, owner.plan)


def test_sites_without_fitted_learners_refuse_anything_below_all(model):
    acm = sites(model)["a"]
    acm.state, acm.dense = "dense", torch.nn.Linear(8, 8)
    conversion(model).table = None
    for request in (lambda: set_k(model, 2), lambda: set_budget(model, 0.5), lambda: relax(model, 0.8)):
        with pytest.raises(SitesNotFitted, match=r"a\b.*\n.*calibrate"):
            request()
    set_k(model, 4)
    set_budget(model, 1.0)


def test_relaxation_is_for_training_only(model):
    relax(model, 0.8)
    assert run_mode(sites(model)["a"]) == Relaxed(0.8)
    x = torch.randn(2, 3, 8)
    assert torch.equal(model.eval()(x), model(x))
    model.train()(x)
    assert len(sites(model)["a"].choices) == 1
    relax(model, None)
    assert not sites(model)["a"].choices
    with pytest.raises(UsageError):
        relax(model, 0.0)


def test_record_counts_what_ran(model):
    set_k(model, None)
    x = torch.randn(3, 5, 8)
    with record(model) as usage:
        model(x)
    plan = conversion(model).plan
    run = {name: usage.k[name].double() for name in ("a", "b")}
    per_learner = {name: macs_per_learner(plan.site(name)) for name in run}
    used = sum(k.sum(1) * per_learner[name] for name, k in run.items())
    full = sum(5 * plan.site(name).learners * per_learner[name] for name in run)
    torch.testing.assert_close(usage.shares, used / full)
    assert usage.budget == pytest.approx(float((used / full).mean()))
    gates = 5 * sum(gate_macs_per_token(plan.site(name)) for name in run)
    torch.testing.assert_close(usage.macs, used + gates)
    assert not observers_of(conversion(model))
    assert not model._forward_pre_hooks


def test_a_record_prints_what_was_reached_and_each_site(model):
    with record(model) as usage:
        assert str(usage) == "usage: no forward recorded yet"
        set_k(model, 2)
        model(torch.randn(3, 5, 8))
    lines = str(usage).splitlines()
    assert lines[0].startswith(f"budget {usage.budget:.3f} reached over 3 examples: ")
    assert [line.split() for line in lines[3:]] == [["a", "2.00", "4", "15"], ["b", "2.00", "2", "15"]]
    assert repr(usage) == f"<Usage of 2 sites: {lines[0]}>"
    with record(model) as usage:
        model(torch.randn(1, 5, 8))
    assert " reached over 1 example: " in str(usage)
    with record(model) as usage:
        model(torch.randn(0, 5, 8))
    assert str(usage) == "usage: no example recorded yet: the calls were of empty batches"


def test_a_record_of_all_learners_costs_what_the_plan_says(model):
    set_budget(model, 1.0)
    with record(model) as usage:
        model(torch.randn(1, 5, 8))
    assert usage.budget == 1.0
    assert usage.macs.item() == conversion(model).plan.cost.macs(1.0)


def test_padding_counts_nowhere(model):
    set_k(model, None)
    x = torch.randn(2, 6, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    with batches.batch(model, mask=mask), record(model) as padded:
        model(x)
    with record(model) as alone:
        model(x[1:, :3])
    assert padded.masked and not alone.masked
    assert (padded.k["a"][1, 3:] == -1).all()
    torch.testing.assert_close(padded.shares[1], alone.shares[0])
    torch.testing.assert_close(padded.macs[1], alone.macs[0])


def test_an_example_of_padding_alone_is_no_part_of_the_budget(model):
    set_budget(model, 0.5)
    x = torch.randn(3, 6, 8)
    mask = torch.ones(3, 6)
    mask[1] = 0
    with batches.batch(model, mask=mask), record(model) as padded:
        model(x)
    with record(model) as alone:
        model(x[::2])
    assert padded.shares.isnan().tolist() == [False, True, False]
    assert padded.budget == pytest.approx(alone.budget)
    assert padded.pooled_budget == pytest.approx(alone.pooled_budget)


def test_a_record_of_no_example_holds_none(model):
    with record(model) as usage:
        model(torch.randn(0, 6, 8))
    assert usage.macs.shape == usage.dense_macs.shape == (0,) and math.isnan(usage.budget)


def test_padding_alone_has_no_share(model):
    with batches.batch(model, mask=torch.zeros(2, 6)), record(model) as usage:
        model(torch.randn(2, 6, 8))
    assert math.isnan(usage.budget) and math.isnan(usage.pooled_budget) and usage.shares.isnan().all()
    assert "budget nan reached over 0 examples" in str(usage)


@pytest.mark.parametrize("mode", ["inference", "record", "relaxed", "dense"])
@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"mask": torch.ones(2, 4)}, "tokens"),
        ({"mask": torch.ones(3, 6)}, "examples"),
        ({"budgets": [0.5, 0.5, 0.5]}, "examples"),
    ],
)
def test_what_a_batch_says_must_fit_every_site_whoever_reads_it(model, mode, said, found):
    if mode == "relaxed":
        relax(model.train(), 0.8)
    with batches.batch(model, **said), record(model) if mode == "record" else nullcontext():
        if mode == "dense":
            model.acms[0].state, model.acms[0].dense = "dense", torch.nn.Linear(8, 8)
        with pytest.raises(LayoutUnknown, match=rf"a: .*{found}"):
            model(torch.randn(2, 6, 8))


def test_budgets_per_example_equal_budgets_one_by_one(model):
    x = torch.randn(3, 5, 8)
    wanted = torch.tensor([0.3, 1.0, 0.6])
    with batches.batch(model, budgets=wanted), record(model) as usage:
        y = model(x)
    for i, budget in enumerate(wanted.tolist()):
        set_budget(model, budget)
        with record(model) as single:
            torch.testing.assert_close(model(x[i : i + 1]), y[i : i + 1])
        assert torch.equal(single.k["a"][0], usage.k["a"][i])
    assert batch_of(conversion(model)) is None


def k_of(model, x, budgets):
    with torch.no_grad(), batches.batch(model, budgets=budgets), record(model) as usage:
        model(x)
    return torch.stack([k for k in usage.k.values()])


@pytest.mark.parametrize("apart", [True, False])
def test_budgets_per_example_hold_at_any_length_where_a_site_sees_to_their_number(apart):
    first = Residual(Mlp()) if apart else torch.nn.LayerNorm(WIDTH)
    model = gated(
        torch.nn.Sequential(first, Flattened(Mlp())).eval(), torch.randn(2, 5, WIDTH), torch.randn(4, 5, WIDTH)
    )
    x, budgets = torch.randn(3, 7, WIDTH), [0.3, 0.6, 1.0]
    if not apart:  # 3 budgets for 21 tokens, or for 7 examples
        with batches.batch(model, budgets=budgets), pytest.raises(LayoutUnknown, match="a multiple of 5"):
            model(x)
    with batches.batch(model, budgets=budgets, mask=None if apart else torch.ones(3, 7)):
        y = model(x)
    for i, budget in enumerate(budgets):
        set_budget(model, budget)
        torch.testing.assert_close(y[i : i + 1], model(x[i : i + 1]))
    with batches.batch(model, budgets=budgets * 7), pytest.raises(LayoutUnknown, match=r"examples|a multiple of 5"):
        model(x)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_budgets_per_example_overrule_a_fixed_k_and_leave_it_fixed(model, k):
    x, wanted = torch.randn(3, 5, 8), [0.3, 1.0, 0.6]
    expected = k_of(model, x, wanted)
    set_k(model, k)
    before = [state_of(acm) for acm in model.acms]
    assert torch.equal(k_of(model, x, wanted), expected)
    assert [state_of(acm) for acm in model.acms] == before == [acm.written for acm in model.acms]


def test_a_cap_bounds_the_budgets_of_examples_whatever_k_is_fixed(model):
    x = torch.randn(2, 5, 8)
    set_budget(model, 0.5, cap=0.5)
    for k in (None, 0, 4):
        set_k(model, k)
        most = k_of(model, x, [1.0, 1.0])
        assert (most[0] == 2).all() and (most[1] == 1).all()


def test_what_is_set_while_budgets_of_examples_hold_stays(model):
    set_k(model, 1)
    with batches.batch(model, budgets=[0.5]):
        set_budget(model, 0.3)
    assert run_mode(sites(model)["a"]) == Gated(2.5, 0, 4)


def test_budgets_per_example_may_be_listed_as_set_budget_spells_them(model):
    plan = conversion(model).plan
    x = torch.randn(2, 5, 8)
    with batches.batch(model, budgets=torch.tensor([0.3, 1.0])):
        expected = model(x)
    with batches.batch(model, budgets=[0.3, f"{plan.cost.macs(1.0) / plan.model.batch} MACs"]):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"budgets": 0.5},
        {"budgets": torch.tensor(0.5)},
        {"budgets": "50%"},
        {"budgets": torch.ones(2, 2)},
        {"mask": [[1, 1]]},
        {"mask": torch.ones(5)},
    ],
)
def test_what_is_not_one_per_example_is_refused(model, wrong):
    with pytest.raises(UsageError), batches.batch(model, **wrong):
        pass
    assert batch_of(conversion(model)) is None


def test_the_batch_context_does_not_nest_and_closes_after_an_error(model):
    with batches.batch(model), pytest.raises(UsageError, match="already open"), batches.batch(model):
        pass
    with pytest.raises(ZeroDivisionError), batches.batch(model):
        _ = 1 / 0
    with batches.batch(model):
        pass


def test_record_refuses_silence_and_mixed_batches(model):
    with record(model) as usage:
        pass
    with pytest.raises(NothingRecorded):
        _ = usage.budget
    with record(model), pytest.raises(UsageError, match=r"one acm\.record per batch"):
        model(torch.randn(2, 3, 8))
        model(torch.randn(1, 3, 8))


def test_a_compiled_model_cannot_be_recorded(model):
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(CompiledModelError, match="_orig_mod"), record(compiled):
        pass
    model.compile(backend="eager")  # there is no other model behind it
    with pytest.raises(CompiledModelError, match=r"copy\.deepcopy\(model\)"), record(model):
        pass
    with record(copy.deepcopy(model)) as usage:
        pass
    assert str(usage) == "usage: no forward recorded yet"


def test_status_tells_state_and_mode(model):
    set_budget(model, 0.5)
    text = str(status(model))
    assert "a" in text and "4 x 8" in text and "budget: 0.500 (range 0.100 to 1.000)" in text
    low, high = (conversion(model).plan.cost.model_share(share) for share in (0.1, 1.0))
    assert f"; in reach: {low:.0%} to {high:.0%} of the dense model's MACs" in text
    assert "Gated(k_lo=0, k_hi=4)" in text and "knob" not in text
    assert setting_of(conversion(model), 0.5).knob == 1.0


def test_status_tells_how_many_sites_do_not_follow_the_budget(model):
    set_budget(model, 0.5)
    assert "fixed k" not in str(status(model))
    set_k(model.acms[1], 2)
    assert str(status(model)).endswith(f"; 1 of {len(model.acms)} sites run a fixed k")


def test_status_tells_a_cap_and_takes_no_budget_for_a_fixed_k(model):
    set_budget(model, 1.0, cap=0.75)
    text = str(status(model))
    assert "budget: 1.000, every k at most 0.75 N (range" in text and "fixed k" not in text
    set_k(model, 2)
    assert f"{len(model.acms)} of {len(model.acms)} sites run a fixed k" in str(status(model))
    set_budget(model, 1.0)
    assert "at most" not in str(status(model)) and "fixed k" not in str(status(model))


def timed(model, device: str | None = None):
    """The model with measured times of its calls."""
    calls = (CallTime(batch=1, budget=0.3, ms=4.0), CallTime(batch=1, budget=0.7, ms=8.0))
    conversion(model).times = CallTimes(device=device or device_name(torch.device("cpu")), calls=calls)
    return model


def test_a_time_sets_the_largest_budget_measured_within_it(model):
    assert set_budget(timed(model), "9 ms") == pytest.approx(0.7)
    assert set_budget(model, "5 ms at 2") == pytest.approx(0.3) == conversion(model).budget
    with pytest.raises(BudgetUnreachable, match="4 ms or more"):
        set_budget(model, "3 ms")
    assert conversion(model).budget == pytest.approx(0.3)


def test_a_time_is_refused_without_times_of_this_device_and_per_phase(model):
    with pytest.raises(NoBudgetTable, match="acmc bench"):
        set_budget(model, "9 ms")
    with pytest.raises(UsageError, match=r"another device.*found A card"):
        set_budget(timed(model, "A card"), "9 ms")
    with pytest.raises(UsageError, match="whole calls"):
        set_budget(timed(model), {"prefill": 1.0, "decode": "9 ms"})
