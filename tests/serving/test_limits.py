"""The outermost layer of the server, around apps of one function, without a socket."""

import asyncio
import json

import pytest
from starlette.exceptions import HTTPException

from acm_compiler.serving.limits import Limited, error_body


class Requests:
    """Keeps what the metrics are told."""

    def __init__(self):
        self.seen = []

    def request(self, path, status):
        self.seen.append((path, status))


def request(app, *, body=(b"",), headers=(), path="/classify", kind="http"):
    """Status and body of the answer; what was counted, and parts of the body that nobody read, are kept."""
    sent, counted, parts = [], Requests(), list(body)

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    limited = Limited(app, most=10, metrics=counted, paths=("/classify",))
    scope = {"type": kind, "path": path, "headers": list(headers)}
    try:
        asyncio.run(limited(scope, receive, send))
    finally:
        request.counted, request.left = counted.seen, len(parts)
    return sent


async def echo(scope, receive, send):
    """Answers with the body, as long as there is one."""
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": body})


def test_a_body_within_the_limit_reaches_the_app():
    start, body = request(echo, body=(b"12345", b"67890"))
    assert start["status"] == 200 and body["body"] == b"1234567890"
    assert request.counted == [("/classify", 200)]


def test_a_body_announced_as_too_large_is_refused_unread():
    async def unreachable(scope, receive, send):
        raise AssertionError("the app was called")

    start, body = request(unreachable, headers=[(b"content-length", b"11")])
    assert start["status"] == 413 and "--max-body" in json.loads(body["body"])["error"]["message"]
    assert request.counted == [("/classify", 413)]


@pytest.mark.parametrize(
    "body, headers, left",
    [
        ((b"x" * 9,) * 4, [(b"content-length", b"36")], 0),
        ((b"x" * 9,) * 40, [(b"content-length", b"360")], 22),  # 16 times the limit of 10
        ((b"x" * 9,) * 4, [(b"content-length", b"36"), (b"expect", b"100-continue")], 4),
    ],
)
def test_what_is_sent_of_a_body_too_large_is_read_before_the_answer(body, headers, left):
    """Clients that hear no answer before they have sent all hear this one; a body without end is not awaited."""
    start, _ = request(echo, body=body, headers=headers)
    assert start["status"] == 413 and request.left == left


def test_a_growing_body_is_read_to_its_end_before_it_is_refused():
    async def reads(scope, receive, send):
        with pytest.raises(HTTPException):
            await echo(scope, receive, send)

    request(reads, body=(b"x" * 9,) * 5)
    assert request.left == 0


@pytest.mark.parametrize("length", [b"-1", b"ten", b""])
def test_a_length_that_is_no_number_is_not_believed(length):
    start, _ = request(echo, body=(b"1234",), headers=[(b"content-length", length)])
    assert start["status"] == 200


def test_a_body_that_grows_too_large_is_refused_where_the_app_reads_it():
    met = []

    async def reads(scope, receive, send):
        with pytest.raises(HTTPException) as refused:
            await echo(scope, receive, send)
        met.append(refused.value.status_code)

    assert request(reads, body=(b"123456", b"789012")) == []
    assert met == [413]


def test_a_failure_is_an_answer_without_details_and_paths_of_nobody_are_counted_together(caplog):
    async def fails(scope, receive, send):
        raise RuntimeError("a secret")

    start, body = request(fails, path="/nothing")
    assert start["status"] == 500 and b"secret" not in body["body"]
    assert json.loads(body["body"])["error"]["type"] == "server_error"
    assert request.counted == [("other", 500)] and "a secret" in caplog.text


def test_a_failure_once_the_answer_has_begun_ends_the_connection():
    async def fails(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        raise RuntimeError("too late")

    with pytest.raises(RuntimeError, match="too late"):
        request(fails)
    assert request.counted == [("/classify", 200)]


def test_what_is_no_request_passes():
    async def lifespan(scope, receive, send):
        await send({"type": "lifespan.startup.complete"})

    assert request(lifespan, kind="lifespan") == [{"type": "lifespan.startup.complete"}]
    assert request.counted == []


def test_errors_are_text_whatever_they_hold():
    assert json.loads(error_body(422, "half a pair: \ud800"))["error"]["code"] == 422
    assert json.loads(error_body(422, "x"))["error"]["type"] == "invalid_request_error"
