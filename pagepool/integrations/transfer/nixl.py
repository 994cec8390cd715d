"""NixlTransfer: between processes and machines by NIXL. Needs the extra `transfer` (nixl, nixl-cu12)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool.errors import TransferError
from pagepool.integrations.transfer.protocol import Memory, Transfer
from pagepool.integrations.transfer.tickets import PeerDescription

__all__ = ["NixlTransfer"]


@dataclass
class _Request:
    handle: Any
    peer: str
    error: str = ""


class NixlTransfer(Transfer):
    """A `Transfer` by NIXL: the kernel copies on one machine; between machines RDMA, or TCP where there is none.

    name     as in `Transfer`
    timeout  as in `Transfer`

    It needs no GPU and no torch. NIXL has a thread of its own on both sides, which wants some of a core while pages
    move. Raises `ImportError` when nixl is not installed.
    """

    transport = "nixl"

    def __init__(self, name: str | None = None, timeout: float = 30.0) -> None:
        super().__init__(name, timeout)
        nixl = import_module("nixl._api")
        self._error = import_module("nixl._bindings").nixlError
        self._agent: Any = nixl.nixl_agent(self.name, nixl.nixl_agent_config(backends=["UCX"]))
        self._memory: Any = None

    def _attach(self, memory: Memory) -> bytes:
        arrays = (memory.pages, memory.words, memory.epoch_word, memory.landing)
        regions = [(array.ctypes.data, array.nbytes, 0, "") for array in arrays]
        self._memory = self._agent.register_memory(regions, mem_type="DRAM")
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def _detach(self) -> None:
        self._agent.deregister_memory(self._memory)

    def _connect(self, peer: PeerDescription) -> None:
        self._agent.add_remote_agent(peer.connection)

    def _disconnect(self, peer: PeerDescription, requests: list[Any]) -> None:
        self._agent.remove_remote_agent(peer.name)

    def _post(self, peer: PeerDescription, copies: NDArray[np.int64]) -> Any:
        here, there = copies[:, [0, 2, 2]], copies[:, [1, 2, 2]]
        here[:, 2] = there[:, 2] = 0
        agent = self._agent
        handle = agent.initialize_xfer("READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), peer.name)
        agent.transfer(handle)
        return _Request(handle, peer.name)

    def _check(self, request: Any) -> bool:
        state = self._agent.check_xfer_state(request.handle)
        if state == "DONE":
            self._agent.release_xfer_handle(request.handle)
            return True
        return False
