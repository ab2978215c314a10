"""The outermost layer of the app: bodies of bounded size, requests counted, no failure without words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from acm_compiler.files import size_text
from acm_compiler.serving.metrics import Metrics

_LOG = logging.getLogger(__name__)
# a refused body is read and dropped up to so many times the limit, and for so long: most clients read the answer only
# once they have sent all, and would meet a closed connection
_DROPPED, _PATIENCE_S = 16, 5.0


def error_body(status: int, message: str) -> bytes:
    """An error as OpenAI's clients read it; what no text can hold is replaced."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    document = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return json.dumps(document, ensure_ascii=True).encode()


class Limited:
    """An ASGI app whose requests have bodies of at most `most` bytes; larger ones are refused with 413."""

    def __init__(self, app: Any, *, most: int, metrics: Metrics, paths: Collection[str]) -> None:
        self._app, self._most, self._metrics, self._paths = app, most, metrics, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen, status = 0, 0

        async def bounded() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                if message.get("more_body"):
                    await self._drop(receive)
                raise HTTPException(413, self._words())
            return message

        async def noted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            headers = Headers(scope=scope)
            announced = headers.get("content-length", "")
            if announced.isdecimal() and int(announced) > self._most:
                # such clients, as curl with large bodies, send theirs only once they are asked to
                if headers.get("expect", "").lower() != "100-continue":
                    await self._drop(receive)
                await _refusal(413, self._words())(scope, receive, noted)
            else:
                await self._app(scope, bounded, noted)
        except Exception:
            _LOG.exception("a request failed")
            if status:  # the answer has begun
                raise
            await _refusal(500, "the server failed; its log says where")(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.request(path, status)

    async def _drop(self, receive: Any) -> None:
        """Read what is left of a body, within bounds."""
        left = _DROPPED * self._most
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while left > 0 and (message := await receive()).get("more_body"):
                    left -= len(message["body"])

    def _words(self) -> str:
        return f"the body is too large: at most {size_text(self._most)} (--max-body)"


def _refusal(status: int, message: str) -> Response:
    return Response(error_body(status, message), status, media_type="application/json")
