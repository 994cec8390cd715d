"""HTTP connections: a strict parser with limits, and timeouts for clients that do not send or do not read.

The parser is h11, which uvicorn always installs. uvicorn alone would take httptools where that is installed, which has
no limit on headers and loses the body of a request with `Upgrade: h2c`. h11 alone accepts requests that another server
may read differently (RFC 9112, 6.3 and 11.2); `_StrictParser` refuses them. Needs uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagepool.serve.errors import RequestError, error_object, quoted

__all__ = ["MAX_HEADERS", "MAX_HEAD_BYTES", "Connection", "http_server"]

MAX_HEAD_BYTES = 32 << 10  # request line and headers
MAX_HEADERS = 100
# A chunk costs about 10 us, however small it is. So a body may have this number of chunks, and more of them only if
# they have this mean number of bytes.
MAX_SMALL_CHUNKS = 4096
SMALL_CHUNK_BYTES = 256
# A line that does not end with CR LF, or a header that continues on the next line.
MALFORMED = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]")

HEADER_SECONDS = 20.0  # from opening a connection, or the first byte of a request, to the end of its headers
WRITE_SECONDS = 30.0  # a client must read at least one byte in this time
# Seconds until an idle connection is closed. Many clients drop theirs after 5 seconds. The server must wait longer:
# otherwise it could close a connection while a client sends a request on it.
KEEP_ALIVE = 30

REASONS = {
    400: "Bad Request",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    505: "HTTP Version Not Supported",
}


def http_server(
    app: Any, max_connections: int, *, certificate: str | None = None, key: str | None = None, grace: float = 2.0
) -> uvicorn.Server:
    """Return a server of uvicorn for an ASGI app. Each of its connections is a `Connection`.

    Parameters
    ----------
    app : ASGI application
        Gets the requests.
    max_connections : int
        Maximum number of open connections.
    certificate, key : str or None
        Files for TLS. Without a certificate, the server speaks HTTP.
    grace : float
        Seconds for clients to read their answers when the server ends.
    """
    config = uvicorn.Config(
        app,
        http=partial(Connection, most=max_connections),
        log_config=None,  # uvicorn's closes every log handler of the process
        log_level="warning",
        timeout_graceful_shutdown=grace,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        server_header=False,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    return uvicorn.Server(config)


def last_answer(status: int, reason: str, message: str, *headers: str) -> bytes:
    """Return the bytes of an error response after which the connection is closed."""
    body = json.dumps(error_object(RequestError(status, message)))
    lines = [f"HTTP/1.1 {status} {reason}", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "connection: close", "", body]).encode("ascii")


class _StrictBuffer(ReceiveBuffer):
    """Refuses lines and headers that other servers may read differently, in heads and in trailers."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        data = self._data
        if data[:2] != b"\r\n":  # the end of a body without trailers
            end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
            head = data[: MAX_HEAD_BYTES if end < 0 else end + 4]
            if end < 0 and len(data) >= MAX_HEAD_BYTES:
                raise h11.LocalProtocolError(f"the headers must have at most {MAX_HEAD_BYTES} bytes", 431)
            if head.count(b"\n") > MAX_HEADERS + 2:  # with the request line and the empty line
                raise h11.LocalProtocolError(f"a request must have at most {MAX_HEADERS} headers", 431)
            if MALFORMED.search(head[:-1] if head.endswith(b"\r") else head):
                raise h11.LocalProtocolError("each header must be one line that ends with CR LF")
            if end >= 0:
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if len(lengths) > 1 or b"," in b"".join(lengths):
                    raise h11.LocalProtocolError("a request must have at most one Content-Length")
        found: list[bytearray] | None = super().maybe_extract_lines()
        return found


class _StrictParser(h11.Connection):
    """A parser for a server that refuses ambiguous requests and bodies of very many small chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._receive_buffer = _StrictBuffer()
        self._num_chunks = self._num_bytes = 0
        self.error: h11.RemoteProtocolError | None = None  # the error of the last `next_event`

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._num_chunks = self._num_bytes = 0
                self._check_request(event)
            elif isinstance(event, h11.Data):
                self._num_chunks += event.chunk_start
                self._num_bytes += len(event.data)
                if self._num_chunks > MAX_SMALL_CHUNKS + self._num_bytes // SMALL_CHUNK_BYTES:
                    sentence = f"the body has {self._num_chunks} chunks for {self._num_bytes} bytes: send larger chunks"
                    raise h11.RemoteProtocolError(sentence)
            elif isinstance(event, h11.EndOfMessage) and len(event.headers):
                raise h11.RemoteProtocolError("a body must have no trailers")
        except h11.RemoteProtocolError as error:
            self.error = error
            raise
        return event

    def _check_request(self, event: h11.Request) -> None:
        names = [name for name, _ in event.headers]
        if event.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError("the HTTP version must be 1.0 or 1.1", 505)
        if b"transfer-encoding" in names and (b"content-length" in names or event.http_version == b"1.0"):
            raise h11.RemoteProtocolError("Transfer-Encoding must not come with Content-Length or with HTTP/1.0")


class Connection(H11Protocol):
    """An HTTP connection of uvicorn with a strict parser. It is closed if its client is too slow.

    Parameters
    ----------
    most : int
        Maximum number of open connections of the server. Another connection gets status 503 and is closed.
    """

    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = most
        self.conn = _StrictParser()
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.write(last_answer(503, "Service Unavailable", "too many connections", "retry-after: 1"))
            transport.close()
        else:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # the headers are complete
            self._stop_header_timer()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request. Called by uvicorn."""
        error = self.conn.error or h11.RemoteProtocolError(msg)
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            status = error.error_status_hint if error.error_status_hint in REASONS else 400
            self.transport.write(last_answer(status, REASONS[status], f"invalid HTTP: {quoted(str(error))}"))
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Ignore the header Upgrade, also where a library for WebSockets is installed. Called by uvicorn."""
        return False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _watch_writes(self) -> None:
        """Abort the connection, even with unsent bytes, if the client reads nothing for `WRITE_SECONDS`."""
        unsent = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < unsent:
                self._watch_writes()
            else:
                self.transport.abort()

        self._write_timer = self.loop.call_later(WRITE_SECONDS, look)
