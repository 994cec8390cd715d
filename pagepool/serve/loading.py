"""Answer requests while the model is being loaded. Needs starlette."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from pagepool.serve.errors import RequestError, error_object

__all__ = ["Loading"]


class Loading:
    """An ASGI app that answers 503 until `app` is set, and passes all requests to `app` from then on."""

    def __init__(self) -> None:
        self.app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            found = error_object(RequestError(503, "the model is being loaded"))
            if scope["path"] in ("/health", "/ready"):
                found = {"status": "loading"}
            await JSONResponse(found, 503, {"retry-after": "1"})(scope, receive, send)
