"""NixlTransfer: between processes and machines by NIXL. Needs the extra `transfer` (nixl, nixl-cu12)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from hashlib import sha256
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool.errors import TransferError
from pagepool.transfer.protocol import Memory, Transfer
from pagepool.transfer.tickets import Lease, PeerDescription

__all__ = ["NixlTransfer"]

DIGEST_BYTES = 32  # before NIXL's metadata: their SHA-256


class NixlTransfer(Transfer):
    """A `Transfer` by NIXL: the kernel copies on one machine; between machines RDMA, or TCP where there is none.

    It needs no GPU and no torch. Raises `ImportError` when nixl is not installed.

    Parameters
    ----------
    name
        As in `Transfer`.
    timeout
        As in `Transfer`.
    serves
        Whether peers read from it. NIXL then has a thread of its own, which wants most of a core while pages move
        and some at other times. Without, bytes come while `poll` is called, and with few cores nearly twice as
        fast.
    """

    transport = "nixl"

    def __init__(self, name: str | None = None, timeout: float = 30.0, *, serves: bool = True) -> None:
        super().__init__(name, timeout)
        self.serves = serves
        nixl = import_module("nixl._api")
        kinds = vars(import_module("nixl._bindings")).values()
        # NIXL's exceptions have no base of their own.
        self._errors = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
        self._agent: Any = nixl.nixl_agent(self.name, nixl.nixl_agent_config(serves, backends=["UCX"]))

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
