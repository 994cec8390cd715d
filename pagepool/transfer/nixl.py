"""NixlTransfer: between processes and machines by NIXL. Needs the extra `transfer` (nixl-cu12)."""

from __future__ import annotations

import logging.config
import warnings
from collections.abc import Iterable
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool.errors import TransferError
from pagepool.transfer.protocol import Memory, Transfer
from pagepool.transfer.tickets import Lease, PeerDescription

__all__ = ["NixlTransfer"]

# NIXL's own module `nixl` chooses one of these by torch's version, and fails if another one is installed. Memory of the
# CPU needs neither a GPU nor CUDA, so that each of them will do.
BACKENDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
# Microseconds that the thread which serves reads sleeps while nothing comes; a request wakes it up. NIXL's Python sets
# 0, with which an idle thread takes a core.
IDLE_PAUSE = 500
DIGEST_BYTES = 32  # before NIXL's metadata: their SHA-256


_loading = Lock()  # guards what is replaced in other modules for the duration of an import or of a call


def load_nixl() -> tuple[Any, Any]:
    """Return NIXL's modules `_api` and `_bindings`. Raises `ImportError` if NIXL is not installed.

    NIXL configures its loggers by `logging.config.dictConfig` when it is imported, which closes every handler of the
    process: that call is left out. NIXL's messages go to the root logger, from the level WARNING on.
    """
    name = next((name for name in BACKENDS if find_spec(name) is not None), None)
    if name is None:
        raise ImportError(f"NIXL is not installed: there is none of {', '.join(BACKENDS)}; pip install nixl-cu12")
    with _loading:
        configure, raises = logging.config.dictConfig, logging.raiseExceptions
        logging.config.dictConfig = _leave_handlers
        try:
            return import_module(f"{name}._api"), import_module(f"{name}._bindings")
        finally:
            logging.config.dictConfig, logging.raiseExceptions = configure, raises


def _leave_handlers(config: object) -> None:
    """Takes the place of `logging.config.dictConfig` and leaves all handlers as they are."""


def _new_agent(name: str, serves: bool) -> Any:
    """A `nixl_agent` whose thread sleeps while it is idle."""
    api, bindings = load_nixl()
    base = bindings.nixlAgentConfig

    def set_field(config: Any, name: str, value: object) -> None:
        base.__setattr__(config, name, IDLE_PAUSE if name == "pthrDelay" else value)

    with _loading:
        bindings.nixlAgentConfig = type("Config", (base,), {"__setattr__": set_field})
        try:
            return api.nixl_agent(name, api.nixl_agent_config(serves, backends=["UCX"]))
        finally:
            bindings.nixlAgentConfig = base


class NixlTransfer(Transfer):
    """A `Transfer` by NIXL: the kernel copies on one machine; between machines RDMA, or TCP where there is none.

    It needs no GPU and no torch, and not NIXL's package `nixl`: one of its backends, such as nixl-cu12, will do. Raises
    `ImportError` without one.

    Parameters
    ----------
    name
        As in `Transfer`.
    timeout
        As in `Transfer`.
    serves
        Whether peers read from it. NIXL then has a thread of its own, which wants most of a core while pages move
        over TCP and sleeps while nothing comes. Without, bytes come while `poll` is called.
    """

    transport = "nixl"

    def __init__(self, name: str | None = None, timeout: float = 30.0, *, serves: bool = True) -> None:
        super().__init__(name, timeout)
        self.serves = serves
        _, bindings = load_nixl()
        kinds = vars(bindings).values()
        # NIXL's exceptions have no base of their own.
        self._errors = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
        self._agent: Any = _new_agent(self.name, serves)

    def offer(self, blocks: Iterable[int], names: Iterable[bytes] = (), seconds: float = 60.0) -> Lease:
        """As `Transfer.offer`. Raises `ValueError` without `serves`."""
        if not self.serves:
            raise ValueError(f"transfer {self.name!r} only reads: give serves=True to offer pages")
        return super().offer(blocks, names, seconds)

    def _attach(self, memory: Memory) -> bytes:
        arrays = (memory.pages, memory.words, memory.epoch_word, memory.landing)
        try:
            self._agent.register_memory([(array.ctypes.data, array.nbytes, 0, "") for array in arrays], "DRAM")
            metadata: bytes = self._agent.get_agent_metadata()
        except self._errors as error:
            raise TransferError(f"NIXL cannot register {memory.pages.nbytes} bytes of pages: {error}") from error
        return sha256(metadata).digest() + metadata

    def _detach(self, requests: list[Any]) -> None:
        # A request that is released, and one whose peer is removed, still writes what comes late: only the end of the
        # agent, which closes all connections, ends it.
        for request in requests:
            self._release(request)
        self._agent = None

    def _connect(self, peer: PeerDescription) -> None:
        digest, metadata = peer.connection[:DIGEST_BYTES], peer.connection[DIGEST_BYTES:]
        if sha256(metadata).digest() != digest:  # NIXL reads them in C++, where wrong bytes can end the process
            raise TransferError(f"the description of peer {peer.name!r} was changed on its way")
        try:
            self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransferError(f"NIXL cannot connect to peer {peer.name!r}: {error}") from error

    def _disconnect(self, peer: PeerDescription) -> None:
        self._agent.remove_remote_agent(peer.name)

    def _post(self, peer: PeerDescription, copies: NDArray[np.int64]) -> Any:
        agent, handle = self._agent, None
        sides = np.zeros((2, len(copies), 3), np.int64)  # address, bytes, device
        sides[:, :, 0], sides[:, :, 1] = copies[:, :2].T, copies[:, 2]
        here, there = (agent.get_xfer_descs(side, "DRAM") for side in sides)
        try:
            handle = agent.initialize_xfer("READ", here, there, peer.name)
            agent.transfer(handle)
        except self._errors as error:
            if handle is not None:
                self._release(handle)
            raise TransferError(f"NIXL cannot read from peer {peer.name!r}: {error}") from error
        return handle

    def _check(self, request: Any) -> bool:
        try:
            state = self._agent.check_xfer_state(request)
        except self._errors as error:
            self._release(request)
            raise TransferError(f"NIXL has lost the peer: {error}") from error
        if state == "PROC":
            return False
        self._release(request)
        if state != "DONE":
            raise TransferError(f"a transfer of NIXL ended with {state}")
        return True

    def _release(self, request: Any) -> None:
        try:
            self._agent.release_xfer_handle(request)
        except self._errors as error:
            # NIXL keeps what it cannot cancel until the agent ends.
            warnings.warn(f"NIXL keeps a transfer that it cannot release: {error}", ResourceWarning, stacklevel=2)
