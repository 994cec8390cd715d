"""Read HTTP requests and answer the failed ones."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pagepool.serve.errors import RequestError, error_object, quoted
from pagepool.serve.fields import MAX_BODY_BYTES

if TYPE_CHECKING:
    from pagepool.serve.metrics import Metrics

__all__ = [
    "Bodies",
    "Observer",
    "log_name",
    "on_disconnect",
    "on_http_error",
    "on_refusal",
    "read_id",
]

logger = logging.getLogger("pagepool")
access_logger = logging.getLogger("pagepool.access")

MAX_BODIES_BYTES = 16 * MAX_BODY_BYTES  # all bodies that are being read or parsed
MAX_ID_LENGTH = 256
BODY_SECONDS = 60.0  # the whole body must arrive in this time
PART_SECONDS = 10.0  # the next part of the body must arrive in this time


def read_id(http: HttpRequest) -> str | None:
    """Return the request id that the client chose, or None. Raises `RequestError` if it is too long or unprintable."""
    found = http.headers.get("x-request-id")
    if found and len(found) > MAX_ID_LENGTH:
        raise RequestError(400, f"X-Request-Id must have at most {MAX_ID_LENGTH} characters, not {len(found)}")
    if found and not is_printable(found):
        raise RequestError(400, f"X-Request-Id must contain only printable ASCII characters, not {quoted(found)!a}")
    return found or None


def log_name(http: HttpRequest) -> str:
    """Return the id of a request in the log and in the X-Request-Id of its answer: the client's id, or a new one."""
    state = http.scope.setdefault("state", {})
    if "request_id" not in state:
        own = http.headers.get("x-request-id", "")
        state["request_id"] = own if 0 < len(own) <= MAX_ID_LENGTH and is_printable(own) else uuid.uuid4().hex
    name: str = state["request_id"]
    return name


def is_printable(text: str) -> bool:
    """Return true if a text can be part of a log line as it is."""
    return text.isascii() and text.isprintable()


def printable(text: str) -> str:
    """Escape control characters and non-ASCII characters in a client's text, and cut it, for a log line."""
    return ascii(quoted(text))[1:-1]


class Bodies:
    """Reads the bodies of requests, up to a total size of the bodies that are being read or parsed."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @asynccontextmanager
    async def reading(self, http: HttpRequest) -> AsyncIterator[bytes]:
        """Yield the body. It counts until the block ends.

        Raises `RequestError` as soon as the body is too large or too slow, at once if its Content-Length is too large.
        """
        announced = http.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
            raise too_large()
        body, parts, end = bytearray(), http.stream(), monotonic() + BODY_SECONDS
        try:
            while True:
                left = end - monotonic()
                try:
                    part = await asyncio.wait_for(anext(parts, None), min(left, PART_SECONDS))
                except asyncio.TimeoutError:
                    late = f"the body did not arrive within {BODY_SECONDS:g} s"
                    silent = f"no part of the body arrived for {PART_SECONDS:g} s"
                    sentence = f"{late if left < PART_SECONDS else silent}: got {len(body)} bytes"
                    raise RequestError(408, sentence) from None
                if part is None:
                    break
                body.extend(part)
                self._num_bytes += len(part)
                if len(body) > MAX_BODY_BYTES:
                    raise too_large()
                if self._num_bytes > MAX_BODIES_BYTES:
                    sentence = f"the server is full: the bodies of all requests have more than {MAX_BODIES_BYTES} bytes"
                    raise RequestError(429, sentence)
            yield bytes(body)
        finally:
            self._num_bytes -= len(body)


def too_large() -> RequestError:
    """Return the error for a body that is too large."""
    return RequestError(413, f"the body must have at most {MAX_BODY_BYTES} bytes")


class Observer:
    """ASGI middleware that counts responses by status, adds the request id to their headers and logs them.

    It is the outermost layer of the app: it logs each unexpected exception, once, and answers it.
    """

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = log_name(HttpRequest(scope))
        began, status = monotonic(), 0

        async def observed(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.responses.labels(status).inc()
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            path = printable(scope["path"])
            logger.error("%s %s failed for the request %s", printable(scope["method"]), path, name, exc_info=error)
            if status == 0:
                await failure(name, scope["path"])(scope, receive, observed)
        finally:
            if access_logger.isEnabledFor(logging.INFO):
                client = "{}:{}".format(*scope["client"]) if scope.get("client") else "-"
                path = printable(scope.get("raw_path", b"").decode("latin-1"))
                line = '%s "%s %s" %s %.3f s %s'
                taken = monotonic() - began
                access_logger.info(line, client, printable(scope["method"]), path, status or "-", taken, name)


async def on_disconnect(http: HttpRequest, error: ClientDisconnect) -> Response:
    """Return a response that only the metrics and the log see: the client has disconnected."""
    return Response(status_code=499)


async def on_refusal(http: HttpRequest, error: RequestError) -> Response:
    """Return the response to a refused request."""
    headers = {}
    if error.status in (429, 503):
        headers = {"retry-after": "1"} if error.may_retry else {"x-should-retry": "false"}
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    if error.status == 408:  # the rest of the body may still arrive on this connection
        headers = {"connection": "close"}
    return JSONResponse(error_object(error, http.url.path), error.status, headers)


async def on_http_error(http: HttpRequest, error: HTTPException) -> Response:
    """Return the response to an unknown path or method."""
    message = f"{quoted(http.method)} {quoted(http.url.path)}: {error.detail}"
    return JSONResponse(error_object(RequestError(error.status_code, message), http.url.path), error.status_code)


def failure(name: str, path: str) -> Response:
    """Return the response to a request that failed with an unexpected exception, without its text."""
    error = RequestError(500, f"internal error: see request {name} in the server's log")
    return JSONResponse(error_object(error, path), 500)
