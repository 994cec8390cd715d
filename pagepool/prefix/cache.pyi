from collections.abc import Iterable, Sequence
from typing import SupportsIndex, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.block_refs import BlockRefs, PrefixMatch
from pagepool.prefix.events import NameSnapshot, PrefixEvent, PrefixSnapshot
from pagepool.prefix.explain import Explanation
from pagepool.prefix.store import PrefixStore
from pagepool.prefix.store_link import StoreLink

__all__ = ["PrefixCache"]

_Key: TypeAlias = str | bytes | bool | int | None
_Ids: TypeAlias = Sequence[int] | NDArray[np.integer]

@final
class PrefixCache:
    def __new__(
        cls,
        allocator: BlockAllocator,
        block_size: SupportsIndex | None = None,
        policy: str | None = None,
        *,
        max_events: SupportsIndex = 0,
        store: PrefixStore | None = None,
    ) -> PrefixCache: ...
    def match_prefix(
        self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()
    ) -> NDArray[np.int32]: ...
    def match_tokens(
        self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()
    ) -> PrefixMatch: ...
    def match_held(
        self,
        held: BlockRefs,
        tokens: _Ids,
        cache_salt: _Key = None,
        extra_keys: Iterable[_Key] = (),
        is_use: bool = True,
        reads: bool = True,
    ) -> NDArray[np.int32]: ...
    def cached_tokens(self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()) -> int: ...
    def explain(self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()) -> Explanation: ...
    def miss(
        self,
        row: NDArray[np.int32],
        key: bytes,
        length: SupportsIndex,
        block: SupportsIndex,
        start: SupportsIndex,
        most_compared: SupportsIndex,
        compares_keys: bool,
    ) -> tuple[int, Sequence[tuple[str, int]], int, tuple[int, ...], int, int]: ...
    def cache_blocks(
        self,
        tokens: _Ids,
        blocks: _Ids,
        *,
        cache_salt: _Key = None,
        extra_keys: Iterable[_Key] = (),
        start: SupportsIndex = 0,
        epoch: SupportsIndex | None = None,
    ) -> int: ...
    def touch(self, tokens: _Ids, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()) -> int: ...
    def evict(self, n: SupportsIndex) -> int: ...
    def flush(self, timeout: float | None = None) -> bool: ...
    def discard(self, blocks: _Ids) -> int: ...
    def drain_events(self) -> list[PrefixEvent]: ...
    def snapshot(self) -> PrefixSnapshot: ...
    def name_snapshot(self) -> NameSnapshot: ...
    def reset_prefix_cache(self) -> None: ...
    @property
    def allocator(self) -> BlockAllocator: ...
    @property
    def policy(self) -> str: ...
    @property
    def link(self) -> StoreLink | None: ...
    @property
    def store(self) -> PrefixStore | None: ...
    @property
    def block_size(self) -> int: ...
    kind: str
    @property
    def label(self) -> str: ...
    def references(self) -> list[int]: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def inserted(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def evictable(self) -> int: ...
    def stats(self) -> dict[str, int | str]: ...
    def check(self) -> None: ...
