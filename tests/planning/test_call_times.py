"""From a time to a budget, by the calls that were measured; tests/runtime/test_control.py sets what comes out."""

import pytest
import torch

from acm_compiler.errors import BudgetUnreachable
from acm_compiler.planning.call_times import AskedTime, CallTime, CallTimes, asked_time, device_name

MEASURED = {1: {0.25: 3.0, 0.5: 5.0, 1.0: 9.0}, 8: {0.25: 20.0, 0.5: 19.0, 1.0: 60.0}}
CALLS = tuple(CallTime(batch=b, budget=share, ms=ms) for b, of in MEASURED.items() for share, ms in of.items())
TIMES = CallTimes(device="cpu, TEST", calls=CALLS)


@pytest.mark.parametrize(
    ("text", "ms", "batch"),
    [("9 ms", 9, 1), ("9ms", 9, 1), (" .5 s ", 500, 1), ("9 ms at 8", 9, 8), ("2.5 ms at batch 16", 2.5, 16)],
)
def test_texts_of_times(text, ms, batch):
    assert asked_time(text) == AskedTime(ms=ms, batch=batch)


@pytest.mark.parametrize("other", ["60%", "11 GMACs", 0.6, None, "9", "9 ms at", "9 ms at 0", "-9 ms", {"prefill": 1}])
def test_all_else_is_no_time(other):
    assert asked_time(other) is None


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        ("9 ms", 1.0),
        ("8.9 ms", 0.5),
        ("4 ms", 0.25),
        ("19.5 ms at 8", 0.5),  # the smaller budget took longer
        ("30 ms at 100", 0.5),
        ("9 ms at 2", 1.0),
        ("1 s at 4", 1.0),
    ],
)
def test_the_largest_budget_within_a_time_at_the_nearest_batch(asked, budget):
    assert TIMES.budget_within(asked_time(asked)) == budget


def test_of_two_batches_as_near_the_larger_rules():
    calls = tuple(CallTime(batch=batch, budget=0.5, ms=batch) for batch in (2, 8))
    with pytest.raises(BudgetUnreachable, match="8 ms or more"):
        CallTimes(device="x", calls=calls).budget_within(asked_time("4 ms at 4"))


def test_a_time_that_no_budget_keeps_is_refused_with_the_least():
    with pytest.raises(
        BudgetUnreachable, match=r"found 10 ms at batch 8, expected 19 ms or more: budget 0.5 at batch 8"
    ):
        TIMES.budget_within(asked_time("10 ms at 8"))


def test_a_cpu_is_named_with_its_vectors():
    assert device_name(torch.device("cpu")) == f"cpu, {torch.backends.cpu.get_cpu_capability()}"
