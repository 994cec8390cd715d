"""RequestError: the refusal of a request. No error quotes more than `MAX_QUOTED` characters of a client's text."""

from __future__ import annotations

from typing import Any

__all__ = ["MAX_QUOTED", "RequestError", "error_object", "quoted"]

MAX_QUOTED = 200
MAX_MESSAGE = 1000  # of errors that other libraries word, such as the one of a chat template


class RequestError(Exception):
    """A refused request.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
        One sentence for the client. At most 1,000 characters are kept.
    code, param : str, optional
        `code` and `param` of OpenAI's error object.
    may_retry : bool
        For status 429 and 503: tell the client that it may send the request again.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, *, may_retry: bool = True
    ) -> None:
        message = quoted(message, MAX_MESSAGE)
        super().__init__(message)
        self.may_retry = may_retry
        self.status, self.message, self.code = status, message, code
        self.param = None if param is None else quoted(param)


def error_object(error: RequestError, path: str = "") -> dict[str, Any]:
    """Return the error object that the clients of a path read: Anthropic's below `/v1/messages`, else OpenAI's."""
    kinds, other, around = {404: "not_found_error", 429: "rate_limit_error"}, "server_error", {}
    if path.startswith("/v1/messages"):
        kinds |= {401: "authentication_error", 403: "permission_error", 408: "timeout_error"}
        kinds |= {413: "request_too_large", 503: "overloaded_error"}
        other, around = "api_error", {"type": "error"}
    kind = kinds.get(error.status, other if error.status >= 500 else "invalid_request_error")
    return {**around, "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def quoted(text: str, most: int = MAX_QUOTED) -> str:
    r"""Return a client's text for an error: at most `most` characters, and valid Unicode.

    >>> quoted("x" * 1000, 10), quoted("\ud800")
    ('xxxxxxx...', '\\ud800')
    """
    shown = text if len(text) <= most else f"{text[: most - 3]}..."
    return shown.encode("utf-8", "backslashreplace").decode()
