"""NixlTransfer: copies pages between processes and machines with NIXL. Needs the extra `transfer` (nixl-cu12)."""

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

# The module `nixl` selects a package by the version of torch, and fails if only a different package is installed.
# Transfers of CPU memory need neither a GPU nor CUDA, so any package in this list works.
BACKENDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
# Microseconds that NIXL's progress thread sleeps while it is idle; a request wakes it. NIXL's Python API sets 0, and
# then an idle thread uses a full core: 90 % of one instead of 2 %. Reads of 16 pages of 32 KiB after 0.3 s without a
# request take 0.7 ms (median) with both values, and over TCP 1.8 ms with 500.
IDLE_PAUSE = 500
DIGEST_BYTES = 32  # a SHA-256 digest, which precedes NIXL's metadata


_loading = Lock()  # held while attributes of other modules are replaced, during an import or a call


def load_nixl() -> tuple[Any, Any]:
    """Return NIXL's modules `_api` and `_bindings`.

    On import, NIXL calls `logging.config.dictConfig`, which closes every log handler of the process. This function
    suppresses that call. NIXL's messages of level WARNING and above go to the root logger.

    Raises
    ------
    ImportError
        NIXL is not installed.
    """
    name = next((name for name in BACKENDS if find_spec(name) is not None), None)
    if name is None:
        raise ImportError(f"NIXL is not installed: pip install nixl-cu12 (found none of {', '.join(BACKENDS)})")
    with _loading:
        configure, raises = logging.config.dictConfig, logging.raiseExceptions
        logging.config.dictConfig = _leave_handlers
        try:
            return import_module(f"{name}._api"), import_module(f"{name}._bindings")
        finally:
            logging.config.dictConfig, logging.raiseExceptions = configure, raises


def _leave_handlers(config: object) -> None:
    """Replacement for `logging.config.dictConfig` that leaves all handlers unchanged."""


def _new_agent(name: str, serves: bool) -> Any:
    """Return a `nixl_agent` with a progress thread that sleeps while it is idle."""
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
    """A `Transfer` that copies pages with NIXL.

    On one machine the kernel copies the pages. Between machines NIXL uses RDMA, or TCP if RDMA is not available.
    Neither a GPU nor torch is needed. One NIXL backend, such as the package nixl-cu12, is enough.

    Parameters
    ----------
    name : str or None
        As in `Transfer`.
    timeout : float
        As in `Transfer`, in seconds.
    serves : bool
        Whether peers read pages from this engine. If true, NIXL runs a progress thread. It uses most of a core while
        pages move over TCP, and sleeps while it is idle. If false, reads make progress only during calls of `poll`.

    Raises
    ------
    ImportError
        NIXL is not installed.
    """

    transport = "nixl"

    def __init__(self, name: str | None = None, timeout: float = 30.0, *, serves: bool = True) -> None:
        super().__init__(name, timeout)
        self.serves = serves
        _, bindings = load_nixl()
        kinds = vars(bindings).values()
        # NIXL's exceptions have no common base class.
        self._errors = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
        self._agent: Any = _new_agent(self.name, serves)

    def offer(self, blocks: Iterable[int], names: Iterable[bytes] = (), seconds: float = 60.0) -> Lease:
        """Hold blocks for readers, as `Transfer.offer`. Raises `ValueError` if `serves` is false."""
        if not self.serves:
            raise ValueError(f"transfer {self.name!r} cannot offer pages: it was created with serves=False")
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
        # A released request can still write bytes that arrive late, even after its peer was removed. Only deleting the
        # agent closes all connections and stops these writes.
        for request in requests:
            self._release(request)
        self._agent = None

    def _connect(self, peer: PeerDescription) -> None:
        digest, metadata = peer.connection[:DIGEST_BYTES], peer.connection[DIGEST_BYTES:]
        if sha256(metadata).digest() != digest:  # corrupt metadata can crash NIXL's C++ parser
            raise TransferError(f"the description of peer {peer.name!r} is corrupt: its connection has another digest")
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
            raise TransferError(f"NIXL has lost the connection to the peer: {error}") from error
        if state == "PROC":
            return False
        self._release(request)
        if state != "DONE":
            raise TransferError(f"NIXL's read ended in state {state}, not DONE")
        return True

    def _release(self, request: Any) -> None:
        try:
            self._agent.release_xfer_handle(request)
        except self._errors as error:
            # NIXL keeps a transfer that it cannot cancel until the agent is deleted.
            warnings.warn(f"NIXL keeps a transfer that it cannot release: {error}", ResourceWarning, stacklevel=2)
