"""Read HTTP requests and answer the failed ones."""

from __future__ import annotations

import asyncio
import logging
import uuid
from time import monotonic
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pagepool.serve.protocol import RequestError, error_object

if TYPE_CHECKING:
    from pagepool.serve.metrics import Metrics

__all__ = [
    "Observer",
    "log_name",
    "on_disconnect",
    "on_failure",
    "on_http_error",
    "on_refusal",
    "read_all",
    "read_id",
]

logger = logging.getLogger("pagepool")
access_logger = logging.getLogger("pagepool.access")

MAX_BODY_BYTES = 16 << 20
MAX_ID_LENGTH = 256
BODY_SECONDS = 60.0  # the whole body must arrive in this time
PART_SECONDS = 10.0  # the next part of the body must arrive in this time


def read_id(http: HttpRequest) -> str | None:
    """Return the request id that the client chose, or None. Raises `RequestError` if it is too long or unprintable."""
    found = http.headers.get("x-request-id")
    if found and len(found) > MAX_ID_LENGTH:
        raise RequestError(400, f"X-Request-Id must have at most {MAX_ID_LENGTH} characters, not {len(found)}")
    if found and not is_printable(found):
        raise RequestError(400, f"X-Request-Id must contain only printable ASCII characters, not {found!a}")
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
    """Escape control characters and non-ASCII characters in a client's text, for a log line."""
    return ascii(text)[1:-1]


async def read_all(http: HttpRequest) -> bytes:
    """Return the body. Raises `RequestError` as soon as the body is too large or too slow."""
    body, parts, end = bytearray(), http.stream(), monotonic() + BODY_SECONDS
    while True:
        left = end - monotonic()
        try:
            part = await asyncio.wait_for(anext(parts, None), min(left, PART_SECONDS))
        except asyncio.TimeoutError:
            late = f"the body did not arrive within {BODY_SECONDS:g} s"
            silent = f"no part of the body arrived for {PART_SECONDS:g} s"
            raise RequestError(408, f"{late if left < PART_SECONDS else silent}: got {len(body)} bytes") from None
        if part is None:
            return bytes(body)
        body.extend(part)
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(413, f"the body must have at most {MAX_BODY_BYTES} bytes")


class Observer:
    """ASGI middleware that counts responses by status, adds the request id to their headers and logs them."""

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
    return JSONResponse(error_object(error), error.status, headers)


async def on_http_error(http: HttpRequest, error: HTTPException) -> Response:
    """Return the response to an unknown path or method."""
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(error_object(RequestError(error.status_code, message)), error.status_code)


async def on_failure(http: HttpRequest, error: Exception) -> Response:
    """Log an unexpected exception and return a response without its text."""
    name = log_name(http)
    path = printable(http.url.path)
    logger.error("%s %s failed for the request %s", http.method, path, name, exc_info=error)
    return JSONResponse(error_object(RequestError(500, f"internal error: see request {name} in the server's log")), 500)
