"""`acmc serve` as users start it: what it refuses before it starts, and a process from its start to its end."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.cli.serve import seconds_of
from acm_compiler.errors import BudgetUnreachable, UsageError
from acm_compiler.evaluation.results import load_evaluation, save_evaluation
from acm_compiler.serving.open_served import budget_range
from tests.helpers import served as small
from tests.helpers.rewrite_cases import ALL, rewritten


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    small.save_images(folder)
    return folder


def refused(*arguments, code):
    done = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_folder_that_is_not_ours_is_refused(tmp_path):
    assert "no such folder" in refused(tmp_path / "nope", "--port", 0, code=2)
    assert refused(tmp_path, "--port", 0, "--task", "classify", code=1)


def test_a_task_that_is_not_served_is_refused_with_what_serves_it(images):
    assert "expected embed, classify" in refused(images, "--port", 0, code=2)
    assert "transformers serve" in refused(images, "--port", 0, "--task", "causal_lm", code=2)


def test_a_model_of_texts_without_a_tokenizer_says_what_is_missing(tmp_path):
    acm.save(rewritten(ALL["hf_bert"], init="random")[2], tmp_path / "out")
    assert "tokenizer.json" in refused(tmp_path / "out", "--port", 0, "--task", "classify", code=2)


def test_a_port_that_is_taken_is_refused(images):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = refused(images, "--task", "classify", "--port", port, code=2)
    assert f"127.0.0.1:{port}: the server cannot listen there" in words and "--port" in words


@pytest.mark.parametrize(
    "options, words",
    [
        (("--slo", "fast"), "--slo must be a time"),
        (("--max-wait", "2"), "a number and its unit"),
        (("--max-body", "much"), "--max-body must be a size"),
        (("--budgets", "1:.25"), "must be at most the highest"),
        (("--budgets", "a:b"), "cannot be read"),
        (("--max-loss", "0.01"), "acmc eval DIR"),
        (("--device", "abacus"), "no such device"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(images, options, words):
    assert words in refused(images, "--task", "classify", "--port", 0, *options, code=2)


def test_a_budget_out_of_reach_is_refused(images):
    assert "0.200 to 1" in refused(images, "--task", "classify", "--port", 0, "--budgets", "0.01:1", code=4)
    words = refused(images, "--task", "classify", "--port", 0, "--budgets", "9", code=4)
    assert words.startswith("error: --budgets: no setting") and words.endswith("or a lowest and a highest: 0.2:1\n")


def test_missing_packages_are_named_with_the_extra(monkeypatch, images):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    words = refused(images, "--task", "classify", code=1)
    assert "needs uvicorn" in words and "acm_compiler[serve]" in words


def test_times_have_units():
    assert (seconds_of("50ms", "x"), seconds_of("1.5 s", "x")) == (0.05, 1.5)


def test_budgets_are_those_of_the_options(images):
    model = small.opened(images, "classify")

    def found(budgets=None, *, slo=True):
        given = budget_range(model, load_evaluation(images), budgets, None, slo=slo)
        return given.low, given.high

    assert found() == (0.2, 1.0)
    assert found(slo=False) == (0.6, 0.6)  # the budget that the folder was saved with
    assert found(".3:.9") == (0.3, 0.9) and found(".4") == (0.4, 0.4)
    with pytest.raises(BudgetUnreachable):
        found("0.1:1")


def test_a_loss_that_is_allowed_raises_the_floor(images, tmp_path):
    model = small.opened(images, "classify")
    evaluation = evaluated(model, tmp_path)
    save_evaluation(tmp_path, evaluation)
    assert load_evaluation(tmp_path) is not None

    def floor(loss, budgets=None):
        return budget_range(model, load_evaluation(tmp_path), budgets, loss, slo=True).low

    lowest = min(row.asked for row in evaluation.budgets)
    assert lowest > 0.19 and floor(None) == lowest  # at budgets below nobody knows what is lost
    assert floor(0.06) == 0.2 and floor(0.011) == 0.5 and floor(0.011, ".7:1") == 0.7
    with pytest.raises(UsageError, match="no allowed budget"):
        floor(0.011, ".3:.4")
    with pytest.raises(UsageError, match="loses more"):
        floor(0.0)
    with pytest.raises(UsageError, match=r"found 5, expected 0 to 1.*\n.*5 points of a hundred.* 0\.05"):
        floor(5)


def evaluated(model, tmp_path):
    """An evaluation at budgets .2, .5 and 1, which lose .05, .01 and .001 of an accuracy of .9."""
    from dataclasses import replace

    import torch

    data = [{"image": torch.randn(4, 3, 16, 16), "label": torch.tensor([0, 1, 0, 1])}]
    found = acm.evaluate(model.model, data, task="classify", budgets=[0.2, 0.5, 1.0])
    rows = [replace(row, metric=0.9 - loss) for row, loss in zip(found.budgets, (0.05, 0.01, 0.001), strict=True)]
    return replace(found, budgets=tuple(rows), metric=replace(found.metric, dense=0.9))


class Process:
    """A server in a process of its own."""

    def __init__(self, folder, *options, task="classify"):
        command = [sys.executable, "-m", "acm_compiler", "serve", str(folder), "--task", task, "--port", "0"]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        self.lines = []
        self.url = None
        while self.url is None and (line := self.process.stderr.readline()):
            self.lines.append(line)
            found = re.search(r"at (http://\S+);", line)
            self.url = found and found[1]
        assert self.url, "".join(self.lines)

    def ask(self, path, document=None):
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(self.url + path, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def end(self, number):
        self.process.send_signal(number)
        with self.process:
            return self.process.wait(60), self.process.stderr.read()


def many(count):
    import numpy as np

    return {"images": np.zeros((count, 3, 16, 16)).tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_what_it_took(images, number):
    server = Process(images, "--max-batch", "1", "--slo", "50ms")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.ask("/classify", many(200))))
    asking.start()
    while not server.ask("/health")["waiting"]:
        assert asking.is_alive()
    code, words = server.end(number)
    asking.join()
    assert code == 0 and "every accepted request is answered" in words
    assert len(answers[0]["predictions"]) == 200


@pytest.mark.slow
def test_a_server_that_was_killed_starts_again_clean(images):
    server = Process(images)
    port = server.url.rpartition(":")[2]
    threading.Thread(target=lambda: swallow(server, many(200)), daemon=True).start()
    time.sleep(0.05)
    assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
    again = Process(images, "--port", port)
    assert len(again.ask("/classify", many(1))["predictions"]) == 1
    assert again.end(signal.SIGTERM)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("announced", [True, False])
def test_a_client_that_sends_a_large_body_hears_that_it_is_too_large(images, announced):
    server, part = Process(images), b" " * 1_000_000
    host = server.url.removeprefix("http://")
    for count in (17, 40):
        length = {"content-length": str(count * len(part))} if announced else {}
        headers = {"content-type": "application/json", "connection": "close", **length}
        with closing(http.client.HTTPConnection(host, timeout=60)) as asked:
            asked.request("POST", "/classify", iter([part] * count), headers, encode_chunked=not announced)
            answer = asked.getresponse()
            assert answer.status == 413 and b"--max-body" in answer.read()
    assert len(server.ask("/classify", many(1))["predictions"]) == 1
    assert server.end(signal.SIGTERM)[0] == 0


def swallow(server, document):
    """Ask a server that dies meanwhile."""
    try:
        server.ask("/classify", document)
    except (OSError, urllib.error.URLError):
        return
