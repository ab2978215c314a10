"""One analysis of a model: its results, each computed once."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import acm_compiler as acm
from acm_compiler.passes.find.count_macs import count_macs
from acm_compiler.passes.find.dataflow import build_dataflow
from tests.helpers import models


def test_a_plan_and_its_rewrite_compute_dataflow_and_macs_once():
    model, inputs = models.hf_bert()
    watched = {build_dataflow.__code__, count_macs.__code__}
    calls = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code in watched:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        acm.rewrite(model, acm.plan(model, inputs))
    finally:
        sys.setprofile(None)
    assert calls == {"build_dataflow": 1, "count_macs": 1}


def test_threads_that_plan_one_model_wait_for_each_other():
    model, x = models.Stack(models.Residual(models.Mlp()), models.Residual(models.Attention())).eval(), models.example()
    with ThreadPoolExecutor(3) as threads:
        first, *others = [made.result() for made in [threads.submit(acm.plan, model, x) for _ in range(3)]]
    assert first.sites and all(plan == first for plan in others)
