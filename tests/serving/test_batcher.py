"""The queue and its worker, over functions in place of models."""

import threading
from concurrent.futures import CancelledError, wait

import pytest

from acm_compiler.errors import UsageError
from acm_compiler.serving.batcher import Batcher, Limits, ModelFailed, Refused, WorkerDied
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.pace import Line, Pace

SECONDS = 20  # far more than any test waits


class Seen:
    """Batches and deaths that a batcher reported."""

    def __init__(self):
        self.sizes, self.deaths = [], 0

    def batch(self, latencies_s, *, budget):
        self.sizes.append(len(latencies_s))

    def died(self):
        self.deaths += 1


def echo(examples, own, budget):
    return [(example["x"], budget if share is None else share) for example, share in zip(examples, own, strict=True)]


class Held:
    """A function that waits before its first batch until `go` is set."""

    def __init__(self, then=echo):
        self.go, self.began, self.then, self.sizes = threading.Event(), threading.Event(), then, []

    def __call__(self, examples, own, budget):
        self.began.set()
        assert self.go.wait(SECONDS)
        self.sizes.append(len(examples))
        return self.then(examples, own, budget)


@pytest.fixture
def started():
    """Makes started batchers, which are stopped at the end."""
    made = []

    def make(run=echo, **limits):
        seen = Seen()
        limits = Limits(**{"batch": 4, "wait_s": 0.0} | limits)
        controller = Controller(Pace({0.5: Line(0.01, 0.001)}), low=0.5, high=0.5)
        batcher = Batcher(run, controller, limits, seen, cells=lambda example: example.get("cells", 1))
        batcher.start()
        made.append(batcher)
        return batcher, seen

    yield make
    for batcher in made:
        batcher.stop()


def examples(*values):
    return [{"x": value} for value in values]


def results(futures):
    return [future.result(SECONDS) for future in futures]


def test_answers_come_in_order_each_at_its_own_budget_or_the_controllers(started):
    batcher, _ = started()
    own, others = batcher.submit(examples(1, 2), 0.9), batcher.submit(examples(3))
    assert results(own) == [(1, 0.9), (2, 0.9)] and results(others) == [(3, 0.5)]


def test_what_waits_is_put_together(started):
    held = Held()
    batcher, seen = started(held)
    first = batcher.submit(examples(0))
    assert held.began.wait(SECONDS)
    rest = [future for value in range(6) for future in batcher.submit(examples(value))]
    assert batcher.waiting == 6
    held.go.set()
    results([*first, *rest])
    assert held.sizes == [1, 4, 2]
    batcher.stop()
    assert seen.sizes == held.sizes


def test_a_batch_waits_to_be_filled(started):
    held = Held()
    batcher, _ = started(held, wait_s=SECONDS)
    futures = [*batcher.submit(examples(1)), *batcher.submit(examples(2, 3, 4))]
    held.go.set()
    results(futures)
    assert held.sizes == [4]


def test_those_of_like_size_run_together_and_none_is_overtaken_for_long(started):
    held = Held()
    batcher, _ = started(held, batch=8)
    first = batcher.submit([{"x": 0}])
    assert held.began.wait(SECONDS)
    sizes = [50, 2, 50, 3, 51, 2]
    rest = [future for x, size in enumerate(sizes) for future in batcher.submit([{"x": x, "cells": size}])]
    held.go.set()
    assert [x for x, _ in results([*first, *rest])] == [0, *range(6)]
    batcher.stop()
    assert held.sizes == [1, 3, 3]


def test_more_than_may_wait_is_refused_whole(started):
    held = Held()
    batcher, _ = started(held, waiting=3)
    first = batcher.submit(examples(0))
    assert held.began.wait(SECONDS)
    batcher.submit(examples(1, 2))
    with pytest.raises(Refused, match="2 inputs are waiting"):
        batcher.submit(examples(3, 4))
    assert batcher.waiting == 2
    held.go.set()
    results(first)


def test_a_bad_request_fails_alone(started):
    def run(examples, own, budget):
        if any(example["x"] < 0 for example in examples):
            raise ValueError("below zero")
        return echo(examples, own, budget)

    held = Held(run)
    batcher, seen = started(held)
    futures = [future for value in (1, -1, 2) for future in batcher.submit(examples(value))]
    held.go.set()
    wait(futures, SECONDS)
    assert [future.exception() is None for future in futures] == [True, False, True]
    with pytest.raises(ModelFailed, match="ValueError: below zero"):
        futures[1].result()
    assert seen.deaths == 0


def test_what_the_model_refuses_in_words_stays_what_it_is(started):
    def run(examples, own, budget):
        raise UsageError("no")

    batcher, _ = started(run)
    (future,) = batcher.submit(examples(1))
    assert isinstance(future.exception(SECONDS), UsageError)


def test_a_worker_that_dies_fails_its_requests_and_is_replaced(started):
    def run(examples, own, budget):
        if examples[0]["x"] == "die":
            raise SystemExit("gone")
        return echo(examples, own, budget)

    batcher, seen = started(run)
    (lost,) = batcher.submit(examples("die"))
    assert isinstance(lost.exception(SECONDS), WorkerDied)
    assert results(batcher.submit(examples(1))) == [(1, 0.5)]
    assert seen.deaths == 1


def test_those_who_wait_outlive_a_worker(started):
    def run(examples, own, budget):
        if examples[0]["x"] == "die":
            raise SystemExit("gone")
        return echo(examples, own, budget)

    held = Held(run)
    batcher, _ = started(held, batch=1)
    lost, kept = batcher.submit(examples("die", 2))
    held.go.set()
    assert isinstance(lost.exception(SECONDS), WorkerDied)
    assert kept.result(SECONDS) == (2, 0.5)


def test_stopping_finishes_what_was_taken_and_takes_nothing_more(started):
    held = Held()
    batcher, _ = started(held)
    futures = [future for value in range(9) for future in batcher.submit(examples(value))]
    batcher.refuse()
    with pytest.raises(Refused, match="stopping"):
        batcher.submit(examples(1))
    held.go.set()
    batcher.stop()
    assert all(future.done() for future in futures) and len(results(futures)) == 9


def test_a_request_that_was_given_up_is_not_run(started):
    held = Held()
    batcher, _ = started(held, batch=1)
    first = batcher.submit(examples(0))
    assert held.began.wait(SECONDS)
    (given_up,) = batcher.submit(examples(1))
    assert given_up.cancel()
    last = batcher.submit(examples(2))
    held.go.set()
    results([*first, *last])
    assert held.sizes == [1, 1]
    with pytest.raises(CancelledError):
        given_up.result()
