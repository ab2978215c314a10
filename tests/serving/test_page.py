"""The page about serving: its commands run, on small models."""

import re
import shlex

import pytest
import typer
from starlette.testclient import TestClient

from acm_compiler.cli.app import app as acmc
from tests.helpers import ROOT
from tests.helpers import served as small

PAGE = (ROOT / "docs/serve.md").read_text()
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
REQUESTS = [shlex.split(line)[1:] for line in LINES if line.startswith("curl ")]
COMMANDS = [shlex.split(line)[1:] for line in LINES if line.startswith("acmc ")]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    small.save_texts(folder)
    with TestClient(small.app_of(small.opened(folder, "embed"), recalibrate=True)[0]) as found:
        yield found


@pytest.mark.parametrize("words", REQUESTS, ids=" ".join)
def test_a_request_of_the_page_is_answered(client, words):
    url, options = words[0], dict(zip(words[1::2], words[2::2], strict=True))
    headers = dict(header.split(": ") for header in [options["-H"]] if "-H" in options) if options else {}
    method = "POST" if "-d" in options else "GET"
    path = url.removeprefix("http://127.0.0.1:8000")
    assert client.request(method, path, content=options.get("-d"), headers=headers).status_code == 200


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_has_options_that_exist(words):
    command = typer.main.get_command(acmc).commands[words[0]]
    assert command.make_context(words[0], words[1:]).params


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
