"""The page about serving: its commands run, on small models."""

import json
import re
import shlex
import signal

import pytest
import typer
from starlette.testclient import TestClient

import acm_compiler as acm
from acm_compiler.cli.app import app as acmc
from acm_compiler.evaluation.results import save_evaluation
from tests.helpers import ROOT
from tests.helpers import served as small
from tests.helpers.decoders import drawn, gated_llama, written
from tests.serving.test_command import Process, evaluated, many

PAGE = (ROOT / "docs/serve.md").read_text()
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
REQUESTS = [shlex.split(line)[1:] for line in LINES if line.startswith("curl ")]
COMMANDS = [shlex.split(line)[1:] for line in LINES if line.startswith("acmc ")]
SERVERS = [words[1:] for words in COMMANDS if words[0] == "serve"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    small.save_texts(folder)
    with TestClient(small.app_of(small.opened(folder, "embed"), recalibrate=True)[0]) as found:
        yield found


def parts_of(words):
    """The path, the document or None, and the headers of a request of the page."""
    url, options = words[0], dict(zip(words[1::2], words[2::2], strict=True))
    headers = dict(header.split(": ") for header in [options["-H"]] if "-H" in options) if options else {}
    return url.removeprefix("http://127.0.0.1:8000"), options.get("-d"), headers


@pytest.mark.parametrize("words", REQUESTS, ids=" ".join)
def test_a_request_of_the_page_is_answered(client, words):
    path, document, headers = parts_of(words)
    assert client.request("POST" if document else "GET", path, content=document, headers=headers).status_code == 200


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_has_options_that_exist(words):
    command = typer.main.get_command(acmc).commands[words[0]]
    assert command.make_context(words[0], words[1:]).params


@pytest.mark.slow
@pytest.mark.parametrize("words", SERVERS, ids=" ".join)
def test_a_server_of_the_page_answers_the_requests_of_the_page(words, tmp_path):
    folder, *options = words
    if "--port" in options:  # whichever is free will do
        at = options.index("--port")
        del options[at : at + 2]
    if folder == "runs/digits":
        small.save_images(tmp_path)
        save_evaluation(tmp_path, evaluated(small.opened(tmp_path, "classify"), tmp_path))
        server = Process(tmp_path, *options)
        assert len(server.ask("/classify", many(3))["predictions"]) == 3
    else:
        small.save_texts(tmp_path)
        server = Process(tmp_path, *options, task="embed")
        for path, document, _ in map(parts_of, REQUESTS):
            if path != "/metrics":
                assert server.ask(path, document and json.loads(document))
    code, log = server.end(signal.SIGTERM)
    assert code == 0 and "every accepted request is answered" in log


def test_the_code_of_the_page_writes_what_each_prompt_gets_alone():
    names = {"acm": acm, "model": gated_llama(), "prompts": [drawn(1, length)[0].tolist() for length in (3, 11)]}
    exec(*re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), names)
    for prompt, output in zip(names["prompts"], names["outputs"].values(), strict=True):
        assert output.generated_tokens == written(names["model"], prompt, 64)


def test_every_endpoint_of_the_page_is_there_and_the_other_way_round(client, tmp_path):
    small.save_images(tmp_path)
    images = TestClient(small.app_of(small.opened(tmp_path, "classify"), recalibrate=True)[0])
    paths = {path for each in (client, images) for path in each.get("/openapi.json").json()["paths"]}
    named = set(re.findall(r"^\| `(?:GET|POST) (/\S*)`", PAGE, re.MULTILINE))
    assert named == paths | {"/docs"}


def test_every_counter_of_the_page_is_there_and_the_other_way_round(client):
    client.post("/v1/embeddings", json={"input": "a"})
    found = set(re.findall(r"^# TYPE (acm_\w+)", client.get("/metrics").text, re.MULTILINE))
    found = {name for name in found if not name.endswith("_created")}
    assert found == set(re.findall(r"`(acm_\w+)`", PAGE))
