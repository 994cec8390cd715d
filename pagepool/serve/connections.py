"""HTTP connections with timeouts for clients that do not send or do not read. Needs uvicorn."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["Connection"]

HEADER_SECONDS = 20.0  # from opening a connection, or the first byte of a request, to the end of its headers
WRITE_SECONDS = 30.0  # a client must read at least one byte in this time
BODY = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":null}}'
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\n%b" % (len(BODY), BODY)
)


class Connection(AutoHTTPProtocol):
    """An HTTP connection of uvicorn that is closed if its client is too slow.

    Parameters
    ----------
    most : int
        Maximum number of open connections of the server. Another connection gets status 503 and is closed.
    """

    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = most
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.write(TOO_MANY)
            transport.close()
        else:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # the headers are complete
            self._stop_header_timer()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

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
