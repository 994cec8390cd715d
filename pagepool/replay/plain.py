"""`--reference`: the reference scheduler over reference memory, with the counts and times of a replay's report."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from pagepool import reference

__all__ = ["PlainBlockManager", "PlainScheduler"]


class PlainScheduler(reference.Scheduler):
    """The reference scheduler. Counts allocated and freed blocks, and measures the time of this work.

    As in `MeteredBlockManager`, a call is a whole batch of appends, or the end or truncation of a state. Evictions are
    not counted.
    """

    block_allocs = block_frees = nanoseconds = 0

    @property
    def active_count(self) -> int:
        """Number of active requests."""
        return len(self.ring)

    @property
    def waiting_count(self) -> int:
        """Number of waiting requests."""
        return len(self.waiting)

    def append(self, requests: list[Any], counts: list[int]) -> bool:
        """See `Preemption`."""
        before, start = self.allocator.in_use, perf_counter_ns()
        taken = super().append(requests, counts)
        self.nanoseconds += perf_counter_ns() - start
        self.block_allocs += self.allocator.in_use - before
        return taken

    def give_back(self, call: Callable[..., None], *given: Any) -> None:
        """Call a method of a state that frees blocks."""
        before, start = self.allocator.in_use, perf_counter_ns()
        call(*given)
        self.nanoseconds += perf_counter_ns() - start
        self.block_frees += before - self.allocator.in_use

    def _open(self, request: Any) -> reference.PagedSeqState:
        return _State(self, self.blocks_for(request.max_tokens))


class _State(reference.PagedSeqState):
    """A sequence that reports freed blocks to its scheduler."""

    def __init__(self, scheduler: PlainScheduler, max_blocks: int) -> None:
        super().__init__(scheduler.allocator, scheduler.block_size, max_blocks)
        self._scheduler = scheduler

    def truncate(self, len: int) -> None:
        """See `PagedSeqState`."""
        if len < self.len:
            self._scheduler.give_back(super().truncate, len)

    def close(self) -> None:
        """See `PagedSeqState`."""
        self._scheduler.give_back(super().close)


class PlainBlockManager:
    """The attributes of `MeteredBlockManager` that a replay reads, for a `PlainScheduler`."""

    def __init__(self, scheduler: PlainScheduler) -> None:
        self.allocator = scheduler.allocator
        self.block_size = scheduler.block_size
        self._scheduler = scheduler

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the states of all requests."""
        return sum(request.kv.len for request in self._scheduler.requests() if request.kv is not None)

    @property
    def block_allocs(self) -> int:
        """Number of blocks allocated so far."""
        return self._scheduler.block_allocs

    @property
    def block_frees(self) -> int:
        """Number of blocks that sequences have freed so far, without evictions by the cache."""
        return self._scheduler.block_frees

    @property
    def nanoseconds(self) -> int:
        """Wall time of the calls that allocated and freed blocks."""
        return self._scheduler.nanoseconds

    def refusal(self, max_tokens: int) -> str | None:
        """Return the reason why a sequence of `max_tokens` can never run, or None."""
        needed, capacity = self._scheduler.blocks_for(max_tokens), self.allocator.max_capacity
        return None if needed <= capacity else f"{max_tokens} tokens need {needed} blocks, the pool has {capacity}"
