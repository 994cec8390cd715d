"""Door: one listening socket, which one front end after the other serves. While there is none, it answers 503.

    Door                          front end                  clients
    503 ─────────────────────────────────────────────────────▶
         ◀── connects ─────────── has started
         ─── socket, service ───▶ answers ───────────────────▶
         ◀── connection ends ──── has ended
    503 ─────────────────────────────────────────────────────▶

The listening socket stays open throughout, so no connection is refused. Needs the packages of the extra `serve`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

__all__ = ["Door", "Service", "enter"]

HEAD_BYTES = 8  # the number of bytes of the pickled service
REASON = "the front end is being started"
RETRY_AFTER = 5  # seconds. A front end takes 10 to 15; OpenAI's clients ask three times


@dataclass
class Service:
    """How a front end serves its socket.

    Attributes
    ----------
    app : dict
        Arguments of `create_app`.
    max_connections : int
        Maximum number of open connections.
    certificate, key : str or None
        Files for TLS.
    access_log : bool
        Whether the log has a line for each request.
    """

    app: dict[str, Any] = field(default_factory=dict)
    max_connections: int = 1000
    certificate: str | None = None
    key: str | None = None
    access_log: bool = True

    def server(self, app: Any) -> Any:
        """Return a server of uvicorn with the strict parser and the limits of `pagepool serve`."""
        http_server = import_module("pagepool.serve.connections").http_server  # needs uvicorn
        return http_server(app, self.max_connections, certificate=self.certificate, key=self.key)


class Door:
    """Gives a listening socket to one front end at a time, and answers 503 while none serves it.

    A front end is a process on this machine that calls `enter`. It has the socket until it ends or closes its
    connection. Then the next one gets it. The answers come from a thread.

    Parameters
    ----------
    sock : socket.socket
        The listening socket. The caller closes it after `close`.
    service : Service
        Sent along with the socket. A change of `service` is for the next front end.
    log : file or None
        The front ends write their log there.

    Attributes
    ----------
    path : str
        A Unix socket in a directory that only this user can read: the argument of `enter`.
    """

    def __init__(self, sock: socket.socket, service: Service, log: Any = None) -> None:
        self._loading = import_module("pagepool.serve.loading").Loading  # needs starlette
        self.service = service
        self._shared = [sock] if log is None else [sock, log]
        self._folder = TemporaryDirectory(prefix="pagepool-")
        self.path = os.path.join(self._folder.name, "door")
        self._meeting = socket.socket(socket.AF_UNIX)
        self._meeting.bind(self.path)
        self._meeting.listen()
        self._meeting.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._work = self._loop.create_task(self._attend())
        self._thread = Thread(target=self._run, name="pagepool-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. A front end that serves the socket continues."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._work.cancel)
        self._thread.join()
        self._meeting.close()
        self._folder.cleanup()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._work)
        self._loop.close()

    async def _attend(self) -> None:
        while True:
            with await self._answer_until_one_enters() as peer, suppress(OSError):  # it ended at once
                data = pickle.dumps(self.service)
                socket.send_fds(peer, [len(data).to_bytes(HEAD_BYTES, "little")], [f.fileno() for f in self._shared])
                peer.setblocking(False)
                await self._loop.sock_sendall(peer, data)
                await self._loop.sock_recv(peer, 1)

    async def _answer_until_one_enters(self) -> socket.socket:
        server = self.service.server(self._loading(REASON, RETRY_AFTER))
        answering = asyncio.create_task(server.serve(sockets=[self._shared[0].dup()]))
        try:
            return (await self._loop.sock_accept(self._meeting))[0]
        finally:
            server.should_exit = True
            await answering


@dataclass
class Entered:
    """The socket and the service from a door. The next front end gets them when `connection` is closed."""

    connection: socket.socket
    sock: socket.socket
    log: int | None  # file descriptor
    service: Service


def enter(path: str) -> Entered:
    """Wait at the door with this path until no other process serves the socket. Raises `OSError` if the door is closed.

    Examples
    --------
    >>> with socket.create_server(("127.0.0.1", 0)) as listening:
    ...     door = Door(listening, Service(max_connections=8))
    ...     entered = enter(door.path)
    ...     with entered.connection, entered.sock:
    ...         entered.sock.getsockname() == listening.getsockname(), entered.service.max_connections
    ...     door.close()
    (True, 8)
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        head, files, _, _ = socket.recv_fds(connection, HEAD_BYTES, 2)
        size, data = int.from_bytes(head, "little"), bytearray()
        while len(data) < size or not files:
            part = connection.recv(size - len(data))
            if not part:
                raise ConnectionError(f"{path}: the door was closed")
            data += part
    except BaseException:
        connection.close()
        raise
    sock, *log = files
    return Entered(connection, socket.socket(fileno=sock), log[0] if log else None, pickle.loads(data))
