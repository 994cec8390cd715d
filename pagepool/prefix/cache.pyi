from collections.abc import Iterable, Sequence
from typing import SupportsIndex, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.held_blocks import HeldBlocks
from pagepool.prefix.events import PrefixEvent, PrefixSnapshot
from pagepool.prefix.summary import CacheSummary

__all__ = ["PrefixCache"]

_Key: TypeAlias = str | bytes | bool | int | None
_Ids: TypeAlias = Sequence[int] | NDArray[np.integer]

@final
class PrefixCache(CacheSummary):
    def __new__(
        cls,
        allocator: BlockAllocator,
        block_size: SupportsIndex | None = None,
        policy: str = "lru",
        *,
        max_events: SupportsIndex = 0,
        hash_bits: int = 64,
    ) -> PrefixCache: ...
    def match_prefix(
        self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()
    ) -> NDArray[np.int32]: ...
    def match_tokens(
        self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()
    ) -> tuple[NDArray[np.int32], int]: ...
    def match_held(
        self, held: HeldBlocks, tokens: _Ids, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()
    ) -> NDArray[np.int32]: ...
    def cached_tokens(self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()) -> int: ...
    def cache_blocks(
        self,
        tokens: _Ids,
        blocks: _Ids,
        *,
        cache_salt: _Key = None,
        extra_keys: Iterable[_Key] = (),
        start: SupportsIndex = 0,
        priority: SupportsIndex = 0,
        ttl: float | None = None,
        now: float = 0.0,
        group: SupportsIndex = 0,
        beside: bool = False,
    ) -> int: ...
    def expire(self, now: float) -> int: ...
    def touch(self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()) -> int: ...
    def evict(self, n: SupportsIndex, *, group: SupportsIndex = 0) -> int: ...
    def discard(self, blocks: _Ids) -> int: ...
    def drain_events(self) -> list[PrefixEvent]: ...
    def snapshot(self) -> PrefixSnapshot: ...
    def reset_prefix_cache(self) -> None: ...
