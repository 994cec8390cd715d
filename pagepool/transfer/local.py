"""LocalTransfer: copies pages between pools of one process by memcpy. Needs no other package."""

from __future__ import annotations

from ctypes import memmove
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from pagepool.errors import TransferError
from pagepool.transfer.protocol import Memory, Transfer
from pagepool.transfer.tickets import PeerDescription

__all__ = ["LocalTransfer"]


class LocalTransfer(Transfer):
    """A `Transfer` between engines of one process, for tests and for several engines that share a process.

    Parameters and methods are the same as in `Transfer`. Peers are found by name, so names must differ.

    Examples
    --------
    >>> from pagepool import KvCachePool, KvLayout
    >>> layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> pools = [KvCachePool.from_layout(layout, num_blocks=4) for _ in range(2)]
    >>> with LocalTransfer("prefill") as source, LocalTransfer("decode") as reader:
    ...     source.register(pools[0])
    ...     reader.register(pools[1])
    ...     theirs, ours = (pool.allocator.allocate_n(2) for pool in pools)
    ...     pools[0].page(theirs[1])[:] = 7
    ...     lease = source.offer(theirs)
    ...     name = reader.meet(source.describe())
    ...     number = reader.read(lease.ticket, ours)
    ...     reader.poll(), float(pools[1].page(ours[1])[0])
    ([ReadResult(read=1, loaded=[0, 1], failed=[], error='')], 7.0)
    """

    transport = "local"
    _by_name: ClassVar[WeakValueDictionary[str, LocalTransfer]] = WeakValueDictionary()

    def _attach(self, memory: Memory) -> bytes:
        if self.name in self._by_name:
            raise TransferError(f"another local transfer of this process has the name {self.name!r}")
        self._by_name[self.name] = self
        return b""

    def _detach(self, requests: list[Any]) -> None:
        del self._by_name[self.name]

    def _connect(self, peer: PeerDescription) -> None:
        self._check_alive(peer)

    def _disconnect(self, peer: PeerDescription) -> None:
        """Do nothing: a local peer needs no connection."""

    def _post(self, peer: PeerDescription, copies: NDArray[np.int64]) -> Any:
        self._check_alive(peer)
        for there, here, num_bytes in copies.tolist():
            memmove(there, here, num_bytes)
        return peer

    def _check(self, request: Any) -> bool:
        return True

    def _check_alive(self, peer: PeerDescription) -> None:
        found = self._by_name.get(peer.name)
        if found is None or found.describe() != peer:  # addresses of an old description may be invalid
            raise TransferError(f"no local transfer of this process has the name {peer.name!r} and epoch {peer.epoch}")
