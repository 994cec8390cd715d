"""MooncakeTransfer: between processes by Mooncake's transfer engine over TCP. Needs the extra `transfer-mooncake`."""

from __future__ import annotations

import os
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from ctypes import CDLL, c_int
from dataclasses import dataclass, field
from importlib import import_module
from time import monotonic, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool.arguments import wrong
from pagepool.errors import TransferError
from pagepool.integrations.transfer.protocol import PAUSE, WORD, Memory, Transfer
from pagepool.integrations.transfer.tickets import PeerDescription

__all__ = ["MooncakeTransfer"]

# Copies from one peer that Mooncake has at a time. It refuses those beyond 2,048, and of a peer that is stopped it
# gives up 4 every 30 s, whose blocks stay taken until then.
WINDOW = 64
NOT_POSTED = (0, 2**64 - 1)  # what posting returns instead of the number of a batch
DONE, FAILED = 1, -1  # states of a batch; all others are on their way
LOG_NOTHING = 3  # a level of glog


@dataclass
class _Request:
    """Copies, each a batch of its own: of a batch of several Mooncake cannot say how it is without waiting for it."""

    peer: PeerDescription
    waiting: deque[list[int]]  # to, from, bytes
    posted: deque[int] = field(default_factory=deque)
    has_failed: bool = False

    def fail(self) -> None:
        self.has_failed = True
        self.waiting.clear()


class MooncakeTransfer(Transfer):
    """A `Transfer` by Mooncake's transfer engine: TCP, with a thread of its own on both sides.

    name     as in `Transfer`
    timeout  as in `Transfer`
    host     name or address by which peers reach this machine

    It needs no GPU. Whoever reaches its ports can read and write the pages of the pool: Mooncake asks for no secret.
    Its log is silent unless `MC_LOG_LEVEL` is set in the environment. Raises `ImportError` when Mooncake or libibverbs
    is not installed, `TransferError` when its engine does not start.
    """

    transport = "mooncake"

    def __init__(self, name: str | None = None, timeout: float = 30.0, host: str = "127.0.0.1") -> None:
        super().__init__(name, timeout)
        if not isinstance(host, str) or not host:
            raise wrong("host", "a name or an address", host)
        module: Any = import_module("mooncake.engine")
        if "MC_LOG_LEVEL" not in os.environ:
            c_int.in_dll(CDLL(module.__file__), "_ZN3fLI17FLAGS_minloglevelE").value = LOG_NOTHING
        self._engine = module.TransferEngine()
        self._copies_of: Counter[str] = Counter()  # copies that are under way, by peer
        self._threads = ThreadPoolExecutor(thread_name_prefix="pagepool-connect")
        self._late_epochs: list[NDArray[np.uint64]] = []  # may be written to until the engine ends
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise TransferError(f"Mooncake's engine does not start for host {host!r}")
        self._address = f"{host}:{self._engine.get_rpc_port()}"

    def _attach(self, memory: Memory) -> bytes:
        arrays = (memory.pages, memory.words, memory.epoch_word, memory.landing)
        addresses, sizes = [array.ctypes.data for array in arrays], [array.nbytes for array in arrays]
        if self._engine.batch_register_memory(addresses, sizes):
            raise TransferError(f"Mooncake cannot register {memory.pages.nbytes} bytes of pages")
        return self._address.encode()

    def _detach(self, requests: list[Any]) -> None:
        # Mooncake cannot call a copy back. With the engine all its connections end; who still connects has it, too.
        self._threads.shutdown()
        self._engine = None

    def _connect(self, peer: PeerDescription) -> None:
        """Reads the peer's epoch. In a thread, since Mooncake waits a minute for the handshake of a stopped peer."""
        epoch, end = np.zeros(1, np.uint64), monotonic() + self.timeout
        posting = self._threads.submit(self._post_copy, peer, [epoch.ctypes.data, peer.epoch_word, WORD])
        try:
            batch = posting.result(self.timeout)
            if batch in NOT_POSTED:
                raise TransferError(f"Mooncake cannot connect to peer {peer.name!r}")
            while (state := self._engine.transfer_check_status(batch)) not in (DONE, FAILED):
                if monotonic() >= end:
                    raise NotYet
                sleep(PAUSE)
        except NotYet:
            posting.cancel()  # or `close` waits for those, too, that have not begun
            self._late_epochs.append(epoch)
            raise TransferError(f"peer {peer.name!r} has not answered for {self.timeout:g} s") from None
        if state == FAILED:
            raise TransferError(f"Mooncake cannot read from peer {peer.name!r}")
        if epoch[0] != peer.epoch:
            raise TransferError(f"peer {peer.name!r} is in epoch {epoch[0]}, not {peer.epoch}")

    def _disconnect(self, peer: PeerDescription) -> None:
        """Mooncake keeps its connections until the engine ends, whose thread does nothing for them."""

    def _post(self, peer: PeerDescription, copies: NDArray[np.int64]) -> Any:
        request = _Request(peer, deque(copies.tolist()))
        self._post_waiting(request)
        if request.has_failed and not request.posted:
            raise TransferError(f"Mooncake cannot read from peer {peer.name!r}")
        return request

    def _check(self, request: Any) -> bool:
        while request.posted:
            state = self._engine.transfer_check_status(request.posted[0])
            if state not in (DONE, FAILED):
                break
            request.posted.popleft()
            self._copies_of[request.peer.name] -= 1
            if state == FAILED:
                request.fail()
        self._post_waiting(request)
        if request.posted or request.waiting:
            return False
        if request.has_failed:
            raise TransferError(f"Mooncake has lost peer {request.peer.name!r}, or the peer refuses these addresses")
        return True

    def _post_waiting(self, request: _Request) -> None:
        while request.waiting and self._copies_of[request.peer.name] < WINDOW:
            batch = self._post_copy(request.peer, request.waiting.popleft())
            if batch in NOT_POSTED:
                request.fail()
            else:
                request.posted.append(batch)
                self._copies_of[request.peer.name] += 1

    def _post_copy(self, peer: PeerDescription, copy: list[int]) -> int:
        """The number of a batch, or one of NOT_POSTED."""
        to, source, num_bytes = copy
        address = peer.connection.decode(errors="replace")
        return int(self._engine.batch_transfer_async_read(address, [to], [source], [num_bytes]))
