"""The controller against a simulated clock, queue and model: no time passes in these tests."""

import random
from bisect import bisect
from itertools import pairwise

import pytest

from acm_compiler.errors import UsageError
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.pace import Line, Pace

SLO = 0.05
MOST = 32
# one request at budget b takes so long, and every batch as long again as _CALL
FIXED, LEARNERS, CALL = 0.0004, 0.0016, 0.001
DENSE_RATE = 1 / (FIXED + LEARNERS)  # requests a second at budget 1, in large batches


def known(longer=1.0):
    """The pace of these costs, or one that takes all to be `longer`."""
    return Pace({b: Line(longer * CALL, longer * (FIXED + LEARNERS * b)) for b in (0.0, 1.0)})


def control(**options):
    """A controller of this pace, of an objective unless there is none."""
    return Controller(options.pop("pace", None) or known(), **({"low": 0.25, "high": 1.0, "slo_s": SLO} | options))


def simulate(controller, rates, *, seed=0):
    """Serve Poisson arrivals at each of `rates`, (requests a second, seconds) one after the other.

    Gives a row (arrival, latency, budget) for every request.
    """
    draw, arrivals, at = random.Random(seed), [], 0.0
    for rate, seconds in rates:
        end = at + seconds
        while (at := at + draw.expovariate(rate)) < end:
            arrivals.append(at)
        at = end
    rows, now, done = [], 0.0, 0
    while done < len(arrivals):
        now = max(now, arrivals[done])
        came = bisect(arrivals, now)
        budget = controller.choose(now, waiting=came - done, oldest_s=now - arrivals[done], arrived=came)
        taken = arrivals[done : done + max(1, int(min(came - done, MOST, controller.most_cells)))]
        took = CALL + len(taken) * (FIXED + LEARNERS * budget)
        now, done = now + took, done + len(taken)
        controller.served([now - arrival for arrival in taken], batch_s=took, cells=len(taken))
        rows += [(arrival, now - arrival, budget) for arrival in taken]
    return rows


def p95(rows):
    latencies = sorted(latency for _, latency, _ in rows)
    return latencies[int(0.95 * len(latencies))]


def changes(rows):
    return sum(before[2] != after[2] for before, after in pairwise(rows))


def test_without_an_objective_the_budget_is_the_highest():
    controller = control(high=0.8, slo_s=None)
    rows = simulate(controller, [(2 * DENSE_RATE, 2)])
    assert {budget for _, _, budget in rows} == {0.8}


def test_one_budget_alone_is_kept():
    assert control(low=0.4, high=0.4).levels == [0.4]


def test_a_light_load_gets_the_highest_budget():
    rows = simulate(control(), [(0.3 * DENSE_RATE, 20)])
    assert {budget for _, _, budget in rows} == {1.0}


@pytest.mark.parametrize("load", [1.0, 1.3, 1.7, 2.0])
def test_the_objective_holds_where_one_budget_misses_it(load):
    rates = [(load * DENSE_RATE, 30)]
    assert p95(simulate(control(slo_s=None), rates)) > SLO
    rows = simulate(control(), rates)
    assert p95(rows) <= SLO


def test_a_load_that_rises_at_once_makes_few_late():
    rows = simulate(control(), [(0.3 * DENSE_RATE, 5), (2 * DENSE_RATE, 5)])
    after = [latency for arrival, latency, _ in rows if arrival > 5]
    assert sum(latency > SLO for latency in after) < 0.02 * len(after)


@pytest.mark.parametrize("longer", [0.4, 2.5])
def test_a_pace_that_was_measured_wrong_is_corrected(longer):
    rows = simulate(control(pace=known(longer)), [(1.7 * DENSE_RATE, 30)])
    assert p95(rows) <= SLO
    rows = simulate(control(pace=known(longer)), [(0.3 * DENSE_RATE, 60)])
    assert rows[-1][2] == 1.0


def test_batches_are_as_large_as_the_budget_leaves_time_for():
    controller = control()
    dense = controller.most_cells
    assert 0 < CALL + dense * (FIXED + LEARNERS) < SLO
    controller.choose(1.0, waiting=200, oldest_s=0.001, arrived=200)
    assert controller.most_cells > 2 * dense
    assert control(slo_s=None).most_cells == float("inf")


def test_it_spends_what_the_load_leaves():
    def mean_budget(load):
        rows = simulate(control(), [(load * DENSE_RATE, 30)])
        return sum(budget for _, _, budget in rows) / len(rows)

    budgets = [mean_budget(load) for load in (0.5, 1.2, 2.0)]
    assert budgets[0] > budgets[1] > budgets[2]
    assert budgets[1] > 0.4  # a load that budget 0.75 could bear is not served at the floor


def test_it_rises_again_when_the_load_goes():
    rows = simulate(control(), [(2 * DENSE_RATE, 10), (0.3 * DENSE_RATE, 60)])
    assert min(budget for _, _, budget in rows) < 0.6
    assert rows[-1][2] == 1.0


def test_it_does_not_flap_at_a_steady_load():
    rows = simulate(control(), [(1.5 * DENSE_RATE, 60)])
    late = [row for row in rows if row[0] > 20]
    assert changes(late) < 0.01 * len(late)


def test_a_burst_lowers_to_the_floor_at_once():
    controller = control()
    assert controller.choose(1.0, waiting=200, oldest_s=0.001, arrived=200) == 0.25


def test_a_step_up_that_was_too_much_makes_the_next_wait_longer():
    def seconds_to_rise(controller, start):
        now = start
        while controller.choose(now, waiting=0, oldest_s=0.0, arrived=0) == 0.25:
            now += 0.01
        return now - start

    controller = control(steps=2)
    controller.choose(0.0, waiting=0, oldest_s=1.0, arrived=0)
    first = seconds_to_rise(controller, 0.0)
    controller.choose(first + 0.1, waiting=0, oldest_s=1.0, arrived=0)
    assert seconds_to_rise(controller, first + 0.2) > 1.5 * first


@pytest.mark.parametrize("options", [{"low": 0.9, "high": 0.2}, {"low": 0.2, "high": 0.9, "slo_s": 0.0}])
def test_what_cannot_be_meant_is_refused(options):
    with pytest.raises(UsageError):
        control(**options)
