"""The cost report as text: whole for published models, units, rows that depend on the plan, what is left out of it."""

from dataclasses import replace

import pytest

import acm_compiler as acm
from acm_compiler.planning.cost_table import cost_table, millions, unit_of
from acm_compiler.site import Skip
from tests.helpers import golden
from tests.helpers.build import plan_of, planned_site
from tests.helpers.models import hf_bert, hf_llama, torchvision_vit


@pytest.mark.parametrize("make", [torchvision_vit, hf_bert, hf_llama])
def test_a_plan_prints_as_its_cost_report(make):
    model, x = make()
    golden.check(f"plan_{make.__name__}.txt", f"{acm.plan(model, x)}\n")


@pytest.mark.parametrize(
    ("macs", "expected"),
    [(999, "kMACs"), (1e6 - 1, "kMACs"), (1e6, "MMACs"), (17.6e9, "GMACs"), (3e12, "TMACs")],
)
def test_macs_are_shown_in_the_largest_unit_that_leaves_a_whole(macs, expected):
    assert unit_of(macs)[0] == expected


def test_parameters_are_millions_up_to_a_billion():
    assert (millions(86_570_000), millions(999_000_000), millions(1_240_000_000)) == ("86.57 M", "999.00 M", "1.24 B")


def test_budgets_begin_with_the_least_and_end_with_all():
    plan = plan_of(planned_site(k_min=1), dense_macs=10**6)
    (line,) = [line for line in cost_table(plan.cost, budgets=(0.01, 0.5, 1.0, 1.5)).splitlines() if "budget (" in line]
    assert "(min)" in line and "0.50" in line and "1.00" in line and "0.01" not in line and "1.50" not in line


def test_a_plan_without_sites_has_no_budgets_and_all_of_it_is_kept():
    lines = cost_table(plan_of(dense_macs=5000).cost).splitlines()
    (kept,) = [line for line in lines if line.startswith("kept ")]
    assert "5.00" in kept and "100.0%" in kept
    assert not any("budget" in line for line in lines) and lines[-1] == "not counted: nothing"


def test_sites_are_listed_where_that_is_asked_for_and_the_batch_is_no_part_of_an_examples_macs():
    one = plan_of(planned_site("a"), planned_site("b"))
    text = cost_table(one.cost, per_site=True)
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("a ", "b "))] == ["a", "b"]
    assert "MACs of one example" not in text
    assert "MACs of one example" in cost_table(plan_of(planned_site(), batch=2).cost)


@pytest.mark.parametrize(
    ("torch_macs", "expected"),
    [(1000, "agrees to the last MAC"), (800, "finds 800 MACs (+25.00% here)"), (0, "+100.00%")],
)
def test_torchs_own_count_agrees_or_the_difference_is_told(torch_macs, expected):
    assert expected in cost_table(plan_of(dense_macs=1000).cost, torch_macs=torch_macs)


def test_skips_are_gathered_by_reason_and_the_rest_counted():
    skips = [Skip(name=f"s{i}", reason=f"reason {i % 8}", macs=0, source=None) for i in range(9)]
    kept = Skip(name="s1", reason="kept", macs=5, source=None)
    text = cost_table(replace(plan_of(dense_macs=1000), skipped=tuple(skips), kept=(kept,)).cost)
    assert "skipped: s0 and 1 more (reason 0)" in text and "kept dense: s1 (kept)" in text
    assert "(reason 1)" not in text  # it is named among what is kept
    assert "skipped: 1 more reason, see --json" in text
