"""Reads HTTP requests, and answers those that fail."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pagepool.serve.metrics import Metrics
from pagepool.serve.protocol import RequestError, error_object

__all__ = [
    "CountResponses",
    "log_name",
    "on_disconnect",
    "on_failure",
    "on_http_error",
    "on_refusal",
    "read_all",
    "read_id",
]

logger = logging.getLogger("pagepool")

MAX_BODY_BYTES = 16 << 20
MAX_ID_LENGTH = 256


def read_id(http: HttpRequest) -> str | None:
    """The client's own id of a request, or None. Raises `RequestError` for one that is too long."""
    found = http.headers.get("x-request-id")
    if found and len(found) > MAX_ID_LENGTH:
        raise RequestError(400, f"X-Request-Id has {len(found)} characters, not up to {MAX_ID_LENGTH}")
    return found or None


def log_name(http: HttpRequest) -> str:
    """The name of a request in the log: the beginning of the client's own id, or a new id."""
    return http.headers.get("x-request-id", "")[:MAX_ID_LENGTH] or uuid.uuid4().hex


async def read_all(http: HttpRequest) -> bytes:
    """The body. Raises `RequestError` when it is too large, before all of it is read."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


class CountResponses:
    """Counts responses by their status."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counted)


async def on_disconnect(http: HttpRequest, error: ClientDisconnect) -> Response:
    """Nobody gets it: the client has left."""
    return Response(status_code=499)


async def on_refusal(http: HttpRequest, error: RequestError) -> Response:
    """The response to a request that is refused."""
    headers = {}
    if error.status in (429, 503):
        headers = {"retry-after": "1"} if error.may_retry else {"x-should-retry": "false"}
    return JSONResponse(error_object(error), error.status, headers)


async def on_http_error(http: HttpRequest, error: HTTPException) -> Response:
    """The response to an unknown path or method."""
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(error_object(RequestError(error.status_code, message)), error.status_code)


async def on_failure(http: HttpRequest, error: Exception) -> Response:
    """The response to an error that nobody expected."""
    name = log_name(http)
    logger.error("%s %s failed for the request %s", http.method, http.url.path, name, exc_info=error)
    return JSONResponse(error_object(RequestError(500, f"the server failed: its log names the request {name}")), 500)
