"""Models of many makers against the truths about them, which were written from their sources."""

import fnmatch
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.passes.survey import grouped_flops
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.usage import Usage
from acm_compiler.sources.inputs import call_model
from tests.zoo import cases
from tests.zoo.cases import QUICK, answers, assert_alike, case, every, plan_of
from tests.zoo.catalogue import FAMILIES, MODELS
from tests.zoo.entry import found_site
from tests.zoo.page import page

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the models' makers


@pytest.mark.parametrize("name", every("zoo", list(MODELS)))
def test_a_model_has_the_sites_that_its_source_has(name):
    one = case(name)
    found, true = Counter(map(found_site, one.plan.sites)), Counter(one.entry.sites)
    missing, unexpected = [*map(str, (true - found).elements())], [*map(str, (found - true).elements())]
    assert (missing, unexpected) == ([], [])
    reasons = {skip.name: skip.reason for skip in one.plan.skipped}
    for pattern, beginning in one.entry.skips.items():
        told = [reason for skip, reason in reasons.items() if fnmatch.fnmatchcase(skip, pattern)]
        assert told and all(reason.startswith(beginning) for reason in told), reasons
    _macs_are_torchs(one)
    if one.plan.sites:
        rewritten = acm.rewrite(one.model, one.plan)
        with torch.no_grad(), acm.record(rewritten) as usage:
            assert_alike(answers(rewritten, one.inputs), answers(one.model, one.inputs))
        _ran_as_planned(usage, one.plan)


def _ran_as_planned(usage: Usage, plan: Plan) -> None:
    """All learners ran, and what stays dense cost as much as the plan says of the dense model."""
    assert usage.dense_macs.sum() == plan.model.dense_macs
    assert usage.macs.sum() == plan.cost.macs(1.0)


def _macs_are_torchs(one: cases.Case) -> None:
    """The plan's MACs are all counted once, and as many as torch counts."""
    plan = one.plan
    parts = sum(kept.macs for kept in plan.kept) + sum(cost.dense_macs for cost in plan.cost.sites)
    assert parts == plan.model.dense_macs
    experts = {torch.ops.aten._grouped_mm: grouped_flops}  # which torch's counter does not know
    counter = FlopCounterMode(display=False, custom_mapping=experts)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it and fused attention are unknown to the counter
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            call_model(one.model, one.inputs)
    except AssertionError:
        assert one.entry.uncounted, "FlopCounterMode does not run this model"
    else:
        assert one.entry.uncounted is None, "FlopCounterMode counts this model by now"
        assert plan.model.dense_macs == counter.get_total_flops() / 2
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@pytest.mark.zoo
@pytest.mark.slow
def test_the_page_of_models_says_what_is_found_today():
    text = page(plan_of)
    if os.environ.get("ACM_ACCEPT"):
        PAGE.write_text(text, encoding="utf-8")
    assert text == PAGE.read_text(encoding="utf-8")


def test_the_zoo_is_large_and_names_each_model_once():
    assert len(MODELS) == sum(map(len, FAMILIES.values())) >= 80


def test_the_page_of_models_lists_the_whole_zoo():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert {line.split("|")[1].strip() for line in lines if line.startswith("| ")} - {"model"} == set(MODELS)


@pytest.mark.parametrize("kind", QUICK)
def test_the_quick_models_show_every_way_into_a_model(kind):
    assert kind in {site.graft.kind for site in case(QUICK[kind]).plan.sites}
