"""Requests of all kinds against the apps: each is answered, or refused in words, and the server lives."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.helpers import served as small

# of the client's own making: 4xx; what a server that is well never answers: 5xx
FINE = {200, 400, 404, 405, 413, 422}
PATHS = ("/v1/embeddings", "/classify", "/classify/files", "/health", "/metrics", "/v1/models", "/", "/docs")
KEYS = ("input", "images", "budget", "top", "encoding_format", "dimensions", "model", "files", "x")
WORDS = st.sampled_from(("a small text", "", "base64", "float", "60%", "1e9MACs", "nan", "\x00", "ü", "\ud800"))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 60), st.floats(), st.text(max_size=30), WORDS
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(WORDS, inner, max_size=3))
BUDGETS = st.one_of(st.none(), st.floats(), st.floats(0.1, 1.1), VALUES)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "input": st.one_of(st.lists(st.integers(-1, 51), max_size=14), st.lists(WORDS, max_size=10), WORDS, VALUES),
        "images": st.one_of(
            st.lists(st.lists(st.lists(st.floats(width=32), max_size=3), max_size=3), max_size=3), VALUES
        ),
        "budget": BUDGETS,
        "top": st.one_of(st.integers(-1, 20), VALUES),
        "encoding_format": st.one_of(st.just("base64"), VALUES),
        "dimensions": VALUES,
    },
)
BODIES = st.one_of(
    NEARLY.map(json.dumps).map(str.encode),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4).map(json.dumps).map(str.encode),
    VALUES.map(json.dumps).map(str.encode),
    st.binary(max_size=200),
    st.integers(1, 100_000).map(lambda depth: b'{"input": ' + b"[" * depth),
    st.integers(99_000, 101_000).map(lambda size: b" " * size),
)
TYPES = ("application/json", "text/plain", "multipart/form-data; boundary=b", "multipart/form-data", "", "\x7f")
PARTS = st.binary(max_size=100).map(
    lambda inner: (
        b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n' + inner + b"\r\n--b--\r\n"
    )
)
REQUESTS = st.tuples(
    st.sampled_from(("POST", "POST", "POST", "GET", "PUT", "HEAD", "DELETE")),
    st.sampled_from(PATHS[:1] + PATHS[:3] + PATHS),
    st.one_of(BODIES, PARTS),
    st.sampled_from(TYPES[:1] * 4 + TYPES),
)


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """Clients of a server of texts and of one of images."""
    folders = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("images")
    small.save_texts(folders[0])
    small.save_images(folders[1])
    data = "{kind: imagefolder, root: /nowhere, image_size: 16}"
    served = small.opened(folders[0], "embed"), small.opened(folders[1], "classify", data)
    with TestClient(small.app_of(served[0])[0]) as texts, TestClient(small.app_of(served[1])[0]) as images:
        yield texts, images


def check(clients, request):
    method, path, body, kind = request
    for client in clients:
        done = client.request(method, path, content=body, headers={"content-type": kind})
        assert done.status_code in FINE, (request, done.text)
        if done.status_code >= 400 and method != "HEAD":
            assert done.json()["error"]["message"].strip(), request
        assert client.get("/health").json()["waiting"] == 0


LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "derandomize": True}


@settings(max_examples=100, **LENIENT)
@given(request=REQUESTS)
def test_a_hundred_requests(clients, request):
    check(clients, request)


@pytest.mark.slow
@settings(max_examples=10_000, **LENIENT)
@given(request=REQUESTS)
def test_ten_thousand_requests(clients, request):
    check(clients, request)
