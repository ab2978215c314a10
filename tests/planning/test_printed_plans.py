"""Printed plans of published models, whole: `ACM_ACCEPT=1` writes them anew."""

import pytest

import acm_compiler as acm
from tests.helpers import golden
from tests.helpers.models import hf_bert, hf_llama, torchvision_vit


@pytest.mark.parametrize("make", [torchvision_vit, hf_bert, hf_llama])
def test_a_plan_prints_as_its_cost_report(make):
    model, x = make()
    golden.check(f"plan_{make.__name__}.txt", f"{acm.plan(model, x)}\n")
