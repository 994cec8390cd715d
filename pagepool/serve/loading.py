"""Answer requests while nothing can serve them yet. Needs starlette."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from pagepool.serve.errors import RequestError, error_object

__all__ = ["Loading"]


class Loading:
    """An ASGI app that answers 503 until `app` is set, and passes all requests to `app` from then on.

    Parameters
    ----------
    reason : str
        The message of the answers.
    retry_after : int
        Seconds after which clients should ask again.
    """

    def __init__(self, reason: str = "the model is being loaded", retry_after: int = 1) -> None:
        self.app: Any = None
        self._reason, self._retry_after = reason, retry_after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            found = error_object(RequestError(503, self._reason))
            if scope["path"] in ("/health", "/ready"):
                found = {"status": "loading"}
            await JSONResponse(found, 503, {"retry-after": str(self._retry_after)})(scope, receive, send)
