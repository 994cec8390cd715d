"""The scheduler's account with a pool: the one place that knows which pool it is and how its states are driven."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pagepool.errors import PoolExhausted
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.batch import append_batch, release_batch
from pagepool.memory.held_blocks import hold
from pagepool.memory.paged_seq import PagedSeqState

__all__ = ["BlockAccount", "NoBlocks", "by_group", "open_account"]


class NoBlocks:
    """The account of a scheduler without a pool: everything fits and nothing is held."""

    num_tokens = 0
    evicted = 0
    capacity = 0
    cache = None

    def refusal(self, max_tokens: int) -> str | None:
        return None

    def room(self) -> int:
        return 0

    def available(self, needs: Mapping[int, int] | None = None) -> int:
        return 0

    def admits(self, wanted: int, promised: int, group: int) -> bool:
        return True

    def blocks_for(self, num_tokens: int) -> int:
        return 0

    def open(self, max_tokens: int, label: int) -> None:
        return None

    def needs(self, states: list[Any], counts: list[int]) -> list[int]:
        return [0] * len(states)

    def take(self, states: list[Any], counts: list[int], groups: list[int] | None = None) -> bool:
        return True

    def cut(self, state: Any, num_tokens: int) -> None:
        return None

    def give_back(self, states: list[Any]) -> None:
        return None

    def rebuild(self, states: list[Any]) -> None:
        return None

    def audit(self, states: list[Any]) -> str | None:
        return None


class BlockAccount:
    """Blocks of one allocator, taken and given back for whole batches.

    `take` is all or nothing. `num_tokens` is the number of tokens in the states that this account opened and has not
    been given back: it knows them all, so that none is lost where a call is interrupted.
    `watermark` is the share of all blocks that an admission must leave free while others run. Blocks that only a
    prefix cache holds (`cache`, None without one) count as free: they are evicted when they are needed, but for what
    `floors` leave to others (None without any). Who needs blocks is told by groups, as in `TenantFloors.group`.
    """

    def __init__(self, allocator: Any, block_size: int, watermark: float = 0.0) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.capacity = allocator.max_capacity
        self.cache: Any = None
        self.floors: Any = None
        self.num_tokens = 0
        self.evicted = 0
        self.held = hold(allocator)  # references that are taken and given back within a call
        self._states: dict[Any, None] = {}
        self._reserve = int(self.capacity * watermark)
        self._make_state, self._append_batch, self._release_batch = _drivers(allocator)
        self._make_state(allocator, block_size, 0)  # refused now rather than in a step, if pools have other blocks

    def refusal(self, max_tokens: int) -> str | None:
        """Why a sequence of `max_tokens` can never run, or None."""
        needed = self.blocks_for(max_tokens)
        capacity = self.capacity
        if needed <= capacity:
            return None
        return (
            f"{max_tokens} tokens need {needed} blocks of {self.block_size}, "
            f"the pool has {capacity} block{'' if capacity == 1 else 's'}"
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def room(self) -> int:
        """Blocks that nobody uses: free ones, those that the pool may still grow by, and evictable ones."""
        available: int = self.allocator.available
        return available if self.cache is None else available + self.cache.evictable

    def available(self, needs: Mapping[int, int] | None = None) -> int:
        """Those of them that can be taken now by who needs `needs[group]` for each group; None: by nobody's."""
        return self.room() if self.floors is None else self.room() - self.floors.protected(needs or {})

    def admits(self, wanted: int, promised: int, group: int) -> bool:
        """True when a prompt finds all of the `wanted` blocks beside others that run: `promised` blocks, which prompts
        already admitted have yet to take, are set aside, and the watermark must be left over.

        Asking for the first chunk alone would admit more prompts than the pool can hold, only to preempt them.
        """
        return self.available({group: wanted}) - promised - wanted >= self._reserve

    def open(self, max_tokens: int, label: int) -> Any:
        """A new, empty state for at most `max_tokens` tokens."""
        state = self._make_state(self.allocator, self.block_size, self.blocks_for(max_tokens))
        state.label = label
        self._states[state] = None
        return state

    def needs(self, states: list[Any], counts: list[int]) -> list[int]:
        """New blocks that `take` would need for each state, apart from reserved blocks and copies of shared ones."""
        blocks_for = self.blocks_for
        lengths = [state.len for state in states]
        return [blocks_for(length + count) - blocks_for(length) for length, count in zip(lengths, counts, strict=True)]

    def take(self, states: list[Any], counts: list[int], groups: list[int] | None = None) -> bool:
        """Append `counts[i]` tokens to `states[i]`, of `groups[i]`, for all; False when the pool is out: only cached
        blocks that nobody uses have been evicted then."""
        while True:
            try:
                self._append_batch(states, counts)
            except PoolExhausted:
                if not self._evict(self.needs(states, counts), groups):
                    return False
            else:
                self.num_tokens += sum(counts)
                return True

    def adopt(self, state: Any, blocks: Any) -> None:
        """Begin `state`, which is empty, with full blocks that others hold, too."""
        state.adopt(blocks)
        self.num_tokens += state.len

    def cut(self, state: Any, num_tokens: int) -> None:
        """Keep the first `num_tokens` of `state`."""
        self.num_tokens -= state.len - num_tokens
        state.truncate(num_tokens)

    def give_back(self, states: list[Any]) -> None:
        """Release all blocks of `states`, which are closed: whoever kept one and uses it gets `StaleHandle`."""
        tokens = sum([state.len for state in states])
        self._release_batch(states, True)
        self.num_tokens -= tokens
        for state in states:
            del self._states[state]

    def rebuild(self, states: list[Any]) -> None:
        """Have exactly `states`; any other one that was opened is given back."""
        self.held.give_back()
        kept = dict.fromkeys(states)
        self._release_batch([state for state in self._states if state not in kept and not state.closed], True)
        self._states = kept
        self.num_tokens = sum([state.len for state in states])

    def audit(self, states: list[Any]) -> str | None:
        """The first equation that does not hold, `states` being all that sequences have, or None."""
        if len(self.held):
            return f"{len(self.held)} references are held outside of a call"
        if self._states != dict.fromkeys(states):
            return f"{len(states)} sequences have blocks, {len(self._states)} states are open"
        if self.num_tokens != sum([state.len for state in states]):
            return f"sequences have {sum([state.len for state in states])} tokens in blocks, not {self.num_tokens}"
        return None

    def _evict(self, needs: list[int], groups: list[int] | None) -> bool:
        """Evict what is missing for `needs`: at least one, since copies of shared blocks are not in it."""
        if self.cache is None:
            return False
        missing = max(sum(needs) - self.allocator.available, 1)
        evicted: int
        if self.floors is None:
            evicted = self.cache.evict(missing)
        else:
            evicted = self.floors.evict(missing, by_group(needs, groups or []))
        self.evicted += evicted
        return evicted > 0


def by_group(needs: list[int], groups: list[int]) -> Counter[int]:
    """The blocks that are needed for each group.

    >>> by_group([1, 2, 3], [0, 4, 4])
    Counter({4: 5, 0: 1})
    """
    total: Counter[int] = Counter()
    for count, group in zip(needs, groups, strict=True):
        total[group] += count
    return total


def open_account(pool: Any, block_size: int, watermark: float) -> BlockAccount | NoBlocks:
    """The account for `pool`: a `KvCachePool`, a `SequencePool` that has one, a `BlockAllocator`, an account, or None.

    A pool with a layout decides the block size; `block_size` serves allocators and flat pools.
    """
    if pool is None:
        return NoBlocks()
    if isinstance(pool, BlockAccount):
        return pool
    if hasattr(pool, "is_kv_based"):
        if not pool.is_kv_based:
            return NoBlocks()
        pool = pool.kv
    allocator = getattr(pool, "allocator", pool)
    if not hasattr(allocator, "free_count"):
        raise TypeError(f"pool must be a KvCachePool, SequencePool or BlockAllocator, not {type(pool).__name__}")
    layout = getattr(pool, "layout", None)
    return BlockAccount(allocator, block_size if layout is None else layout.block_size, watermark)


def _drivers(allocator: Any) -> tuple[Any, Any, Any]:
    """`PagedSeqState`, `append_batch` and `release_batch` for the states of `allocator`.

    An allocator that is not the compiled one brings its own: they are looked up in the package of its class.
    """
    if isinstance(allocator, BlockAllocator):
        return PagedSeqState, append_batch, release_batch
    package = importlib.import_module(type(allocator).__module__.rpartition(".")[0])
    return package.PagedSeqState, package.append_batch, package.release_batch
