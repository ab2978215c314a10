"""Budget tables measured anew on what is served: traffic that drifts, the promise before and after."""

import threading
import time

import pytest
import torch
from starlette.testclient import TestClient

import acm_compiler as acm
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.runtime.meter import TOLERANCE
from acm_compiler.serving.batcher import Refused
from acm_compiler.serving.recalibration import FEWEST, MOST, MOST_BYTES, Recalibration, Traffic, sharing_copy
from tests.helpers import served as small
from tests.helpers.rewrite_cases import ALL, give_budgets, rewritten

SECONDS = 60
GREY, DARK = 0.0, -5.0
BUDGET = 0.5


def images(brightness, count):
    return [{"image": brightness + 0.05 * torch.randn(3, 16, 16)} for _ in range(count)]


@pytest.fixture
def served(tmp_path):
    """A classifier whose gates see how bright an image is, and whose table was measured on grey ones."""
    torch.manual_seed(0)
    model = rewritten(ALL["hf_vit"], init="random")[2]
    give_budgets(model)
    for site in acm.sites(model).values():
        torch.nn.init.normal_(site.gate.outer.weight, std=2.0)
    grey = [torch.stack([example["image"] for example in images(GREY, 16)]) for _ in range(4)]
    acm.recalibrate(model, grey, budgets=(BUDGET,), tokens=10_000)
    acm.save(model, tmp_path)
    return small.opened(tmp_path, "classify")


def serve(served, brightness, batches):
    for _ in range(batches):
        served.run(images(brightness, 8), [None] * 8, BUDGET)


def wait_for(recalibration):
    end = time.monotonic() + SECONDS
    while recalibration.is_running:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_drift_starts_it_and_the_promise_is_kept_afterwards(served, caplog):
    recalibration = Recalibration(served, is_busy=lambda: False, by_itself=True)
    serve(served, GREY, 100)
    assert abs(served.use.drift) < TOLERANCE and not recalibration.is_running and not caplog.records
    serve(served, DARK, 100)
    assert "of another kind" in caplog.text
    wait_for(recalibration)
    assert recalibration.done == 1 and "measured anew" in caplog.text
    caplog.clear()
    serve(served, DARK, 150)
    assert abs(served.use.drift) < TOLERANCE and not caplog.records


def test_requests_are_answered_meanwhile_and_the_old_table_holds_until_then(served):
    asked, gone = threading.Event(), threading.Event()

    def is_busy():
        asked.set()
        assert gone.wait(SECONDS)
        return False

    recalibration = Recalibration(served, is_busy=is_busy, by_itself=False)
    serve(served, DARK, 10)
    table, before = conversion(served.model).table, served.use.drift
    assert recalibration.start() == 80
    assert asked.wait(SECONDS)
    with pytest.raises(Refused, match="already"):
        recalibration.start()
    serve(served, DARK, 10)
    assert conversion(served.model).table is table and served.use.drift == pytest.approx(before, abs=TOLERANCE)
    assert abs(before) > 2 * TOLERANCE
    gone.set()
    wait_for(recalibration)
    counted = sum(sum(tokens) for tokens in served.use.tokens_by_k.values())
    assert conversion(served.model).table is table  # the worker alone puts another in its place
    serve(served, DARK, 10)
    assert conversion(served.model).table.examples == 80 and abs(served.use.drift) < TOLERANCE
    sites = len(acm.sites(served.model))
    assert sum(sum(tokens) for tokens in served.use.tokens_by_k.values()) - counted == 10 * 8 * 17 * sites


def test_what_cannot_be_measured_leaves_the_table(served, caplog):
    recalibration = Recalibration(served, is_busy=lambda: False, by_itself=False)
    with pytest.raises(Refused, match=f"needs at least {FEWEST}"):
        recalibration.start()
    served.seen([{"image": torch.full((3, 16, 16), torch.nan)}] * FEWEST)
    table = conversion(served.model).table
    recalibration.start()
    wait_for(recalibration)
    serve(served, GREY, 1)
    assert "no new budget table" in caplog.text and recalibration.done == 0
    assert conversion(served.model).table is table


def test_a_server_that_stops_gives_it_up_and_waits_for_its_thread(served, caplog):
    asked = threading.Event()

    def is_busy():
        asked.set()
        return True

    recalibration = Recalibration(served, is_busy=is_busy, by_itself=False)
    serve(served, DARK, 10)
    recalibration.start()
    assert asked.wait(SECONDS)
    recalibration.stop()
    assert not recalibration.is_running and recalibration.done == 0 and not recalibration._thread.is_alive()
    assert "no new budget table" not in caplog.text


def test_clips_of_unequal_length_are_measured_on(tmp_path):
    pytest.importorskip("soundfile")
    torch.manual_seed(0)
    small.save_audio(tmp_path)
    served = small.opened(tmp_path, "classify")
    recalibration = Recalibration(served, is_busy=lambda: False, by_itself=False)
    for _ in range(5):
        served.run(
            [{"input_values": torch.randn(samples)} for samples in (99, 100, 100, 101, 120, 99, 40)], [None] * 7, 0.5
        )
    recalibration.start()
    wait_for(recalibration)
    served.run([{"input_values": torch.randn(100)}], [None], 0.5)
    assert recalibration.done == 1 and conversion(served.model).table.examples == 35


def test_a_copy_shares_its_weights_and_nothing_else(served):
    made = sharing_copy(served.model)
    ours, theirs = (dict(model.named_parameters()) for model in (served.model, made))
    assert all(theirs[name] is parameter for name, parameter in ours.items())
    acm.set_budget(served.model, 0.9)
    acm.set_budget(made, 0.4)
    knobs = [[int(site.knob) for site in acm.sites(model).values()] for model in (served.model, made)]
    assert all(ours != theirs for ours, theirs in zip(*knobs, strict=True))
    assert all(site.counts is None for site in acm.sites(made).values())
    assert all(site.counts is not None for site in acm.sites(served.model).values())


def test_a_sample_is_bounded_and_recent():
    traffic = Traffic()
    for number in range(20 * MOST):
        traffic.add([{"x": torch.tensor([number])}])
    kept = [int(example["x"]) for example in traffic.examples()]
    assert len(kept) == len(set(kept)) == MOST
    ages = sorted(20 * MOST - number for number in kept)
    assert 0.5 < ages[MOST // 2] / (4 * MOST * 0.69) < 2  # half of those that came so long ago are left


def test_a_sample_of_large_examples_is_smaller():
    traffic = Traffic()
    large = {"x": torch.empty(MOST_BYTES // 10, dtype=torch.uint8)}
    traffic.add([large] * 20)
    assert len(traffic.examples()) == 10


def test_an_operator_asks_for_it_over_http(served):
    app, _, used = small.app_of(served, recalibrate=True, max_body=1_000_000)
    image = [image["image"].tolist() for image in images(DARK, 8)]
    with TestClient(app) as client:
        assert client.post("/recalibrate").status_code == 503
        for _ in range(8):
            assert client.post("/classify", json={"images": image}).status_code == 200
        done = client.post("/recalibrate")
        assert (done.status_code, done.json()) == (202, {"status": "measuring", "inputs": 64})
        end = time.monotonic() + SECONDS
        while "acm_recalibrations 1.0" not in client.get("/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert client.post("/classify", json={"images": image}).status_code == 200
    assert conversion(used.model).table.examples == 64


def test_nothing_is_kept_of_requests_unless_it_is_wanted(served):
    app, _, used = small.app_of(served)
    with TestClient(app) as client:
        assert client.post("/recalibrate").status_code == 404
    assert used.seen is None
