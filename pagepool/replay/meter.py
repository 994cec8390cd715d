"""A block account and a prefix cache that count and time what passes through them."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from pagepool.scheduling.blocks import BlockAccount

__all__ = ["MeteredAccount", "MeteredCache"]


class MeteredAccount(BlockAccount):
    """Counts blocks allocated and freed, and the wall time of the calls that do it.

    The time is that of `append_batch` and `release_batch` as the scheduler calls them: taking and freeing ids, filling
    the block tables, and the appends that find room in their last block and take none. The loop that totals the
    lengths of released states is not in it.
    """

    def __init__(self, allocator: Any, block_size: int, watermark: float) -> None:
        super().__init__(allocator, block_size, watermark)
        self.block_allocs = 0
        self.block_frees = 0
        self.nanoseconds = 0
        self._append, self._append_batch = self._append_batch, self._timed_append
        self._release, self._release_batch = self._release_batch, self._timed_release

    def _timed_append(self, states: list[Any], counts: list[int]) -> None:
        before = self.allocator.in_use
        start = perf_counter_ns()
        try:
            self._append(states, counts)
        finally:
            self.nanoseconds += perf_counter_ns() - start
        self.block_allocs += self.allocator.in_use - before

    def _timed_release(self, states: list[Any], close: bool) -> None:
        before = self.allocator.in_use
        start = perf_counter_ns()
        self._release(states, close)
        self.nanoseconds += perf_counter_ns() - start
        self.block_frees += before - self.allocator.in_use

    def cut(self, state: Any, num_tokens: int) -> None:
        """Keep the first `num_tokens` of `state`."""
        before = self.allocator.in_use
        start = perf_counter_ns()
        super().cut(state, num_tokens)
        self.nanoseconds += perf_counter_ns() - start
        self.block_frees += before - self.allocator.in_use


class MeteredCache:
    """A `PrefixCache` whose calls by the scheduler are timed; everything else is the cache's own."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.nanoseconds = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        if name not in ("match_held", "match_prefix", "cached_tokens", "cache_blocks", "evict"):
            return found

        def timed(*arguments: Any, **names: Any) -> Any:
            start = perf_counter_ns()
            try:
                return found(*arguments, **names)
            finally:
                self.nanoseconds += perf_counter_ns() - start

        return timed
