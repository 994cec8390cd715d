"""SequencePool: one interface to pages of keys and values, recurrent states, or both."""

from __future__ import annotations

from typing import TypeVar

from pagepool._arguments import wrong
from pagepool.errors import InvalidSlot, refuse_copy
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.memory.state import SequenceSlot

__all__ = ["SequencePool"]

_Pool = TypeVar("_Pool", KvCachePool, SsmStatePool)


class SequencePool:
    """The memory of a model: `kv`, a `KvCachePool`, for attention; `ssm`, an `SsmStatePool`, for recurrence; or both.

    Asking for the kind that it lacks raises `InvalidSlot`.

    >>> pool = SequencePool(kv=KvCachePool(page_size=8, initial_pages=2))
    >>> pool.alloc_kv(), pool.is_kv_based, pool.is_ssm
    (0, True, False)
    """

    __reduce__ = refuse_copy

    def __init__(self, kv: KvCachePool | None = None, ssm: SsmStatePool | None = None) -> None:
        if kv is not None and not isinstance(kv, KvCachePool):
            raise wrong("kv", "a KvCachePool or None", kv)
        if ssm is not None and not isinstance(ssm, SsmStatePool):
            raise wrong("ssm", "an SsmStatePool or None", ssm)
        self._kv = kv
        self._ssm = ssm
        self._closed = False

    @property
    def kv(self) -> KvCachePool | None:
        """The pages, or None."""
        return self._kv

    @property
    def ssm(self) -> SsmStatePool | None:
        """The recurrent states, or None."""
        return self._ssm

    @property
    def is_kv_based(self) -> bool:
        """Whether it has pages of keys and values."""
        return self._kv is not None

    @property
    def is_ssm(self) -> bool:
        """Whether it has recurrent states."""
        return self._ssm is not None

    def stats(self) -> dict[str, dict[str, int]]:
        """The `stats` of the pools that it has, under "kv" and "ssm"."""
        pools = {"kv": self._kv, "ssm": self._ssm}
        return {name: pool.stats() for name, pool in pools.items() if pool is not None}

    def close(self) -> None:
        """Closes the pages as `KvCachePool.close` does, and warns of states in use. A second call does nothing."""
        was_closed, self._closed = self._closed, True
        try:
            if self._kv is not None:
                self._kv.close()
        finally:
            if self._ssm is not None and not was_closed:
                self._ssm.warn_of_leaks()

    def __enter__(self) -> SequencePool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def alloc_kv(self) -> int:
        """Takes a page; returns its number. Raises `PoolExhausted` when none is free."""
        return _present(self._kv, "key-value pages").alloc()

    def free_kv(self, i: int) -> None:
        """Frees page i. Raises `InvalidBlock` when it is out of range or free already."""
        _present(self._kv, "key-value pages").free(i)

    def alloc_ssm(self, request_id: int) -> int:
        """Takes a recurrent state for a request; returns its slot. Raises `PoolExhausted` when none is free."""
        return _present(self._ssm, "recurrent states").alloc(request_id)

    def release_ssm(self, i: int) -> None:
        """Frees slot i and zeroes it. Raises `InvalidSlot` when it is out of range or free already."""
        _present(self._ssm, "recurrent states").release(i)

    def ssm_slot(self, i: int) -> SequenceSlot:
        """The `SequenceSlot` number i, free or not. Raises `InvalidSlot` when it is out of range."""
        return _present(self._ssm, "recurrent states").slot(i)


def _present(pool: _Pool | None, what: str) -> _Pool:
    if pool is None:
        raise InvalidSlot(f"this pool has no {what}")
    return pool
