"""The blocks of running sequences: the one place that knows which pool a scheduler has."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pagepool.errors import PoolExhausted
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.batch import append_batch, release_batch
from pagepool.memory.block_refs import block_refs
from pagepool.memory.block_table import PagedSeqState
from pagepool.scheduling.request import Sequence

__all__ = ["BlockManager", "open_blocks"]


class BlockManager:
    """Takes blocks of one allocator for whole batches, all or none, and gives them back.

    `num_tokens` is the sum of `kv.len` over all sequences that have a state; `evicted` counts the cached blocks that
    were evicted for `append`. Blocks that only the prefix cache holds count as free: they are evicted when they are
    needed, but for those that `reservations` keep for other tenants. `block_refs` has the references that are taken and
    given back within a call. Without an allocator everything fits, and sequences have no states.
    """

    cache: Any = None  # a `PrefixAdapter`, if there is one
    reservations: Any = None  # the `Reservations` of the tenants, set by the scheduler

    def __init__(self, allocator: Any, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.capacity = 0 if allocator is None else allocator.max_capacity
        self.num_tokens = 0
        self.evicted = 0
        if allocator is None:
            return
        self.block_refs = block_refs(allocator)
        self._make_state, self._append_batch, self._release_batch = _drivers(allocator)
        self._make_state(allocator, block_size, 0)  # refused now rather than in a step, if pools have other blocks

    def refusal(self, max_tokens: int) -> str | None:
        """Why a sequence of `max_tokens` can never run, or None."""
        needed, capacity = self.blocks_for(max_tokens), self.capacity
        if needed <= capacity or self.allocator is None:
            return None
        return (
            f"{max_tokens} tokens need {needed} blocks of {self.block_size}, "
            f"the pool has {capacity} block{'' if capacity == 1 else 's'}"
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return 0 if self.allocator is None else -(-num_tokens // self.block_size)

    def room(self) -> int:
        """Blocks that nobody uses: free ones, those that the pool may still grow by, and evictable ones."""
        if self.allocator is None:
            return 0
        available: int = self.allocator.available
        return available if self.cache is None else available + self.cache.evictable

    def available(self, needs: Mapping[Any, int] | None = None) -> int:
        """Those of them that can be taken by tenants that need `needs[tenant]` blocks."""
        protected: int = self.reservations.protected(needs or {})
        return self.room() - protected

    def needs(self, sequences: Iterable[Sequence], counts: Iterable[int]) -> Counter[Any]:
        """The new blocks that `append` would take for each tenant, without copies of shared ones."""
        found: Counter[Any] = Counter()
        for seq, count in zip(sequences, counts, strict=True) if self.allocator is not None else ():
            length = seq.kv.len
            found[seq.tenant] += self.blocks_for(length + count) - self.blocks_for(length)
        return found

    def open(self, seq: Sequence) -> None:
        """Give `seq` a state, empty and for at most its `max_tokens`."""
        if self.allocator is None:
            return
        state = self._make_state(self.allocator, self.block_size, self.blocks_for(seq.max_tokens))
        state.label = seq.id if seq.request_id is None else seq.request_id
        seq.kv = state

    def fork(self, seq: Sequence, fork: Sequence) -> None:
        """Give `fork` a state with the blocks of the tokens that `seq` was fed."""
        if seq.kv is None:
            return
        fork.kv = seq.kv.fork()
        fork.kv.label = fork.id if fork.request_id is None else fork.request_id
        if fork.kv.len > seq.fed:  # slots of drafts
            fork.kv.truncate(seq.fed)
        self.num_tokens += fork.kv.len

    def append(self, sequences: list[Sequence], states: list[Any], counts: list[int]) -> bool:
        """Append `counts[i]` tokens to `states[i]`, the state of `sequences[i]`; cached blocks are evicted for it.

        All of them, or none and False when the pool is out.
        """
        while self.allocator is not None:
            try:
                self._append_batch(states, counts)
            except PoolExhausted:
                needs = self.needs(sequences, counts)
                # At least one: copies of shared blocks are not in `needs`.
                missing = max(1, sum(needs.values()) - self.allocator.available)
                evicted = self.reservations.evict(missing, needs)
                self.evicted += evicted
                if not evicted:
                    return False
            else:
                self.num_tokens += sum(counts)
                break
        return True

    def adopt(self, seq: Sequence, blocks: Any) -> None:
        """Let `seq` begin with full blocks that others hold, too, instead of those that it has."""
        self.num_tokens -= seq.kv.len
        self._release_batch([seq.kv], False)
        seq.kv.adopt(blocks)
        self.num_tokens += seq.kv.len

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` in the state of `seq`."""
        self.num_tokens -= seq.kv.len - num_tokens
        seq.kv.truncate(num_tokens)

    def close(self, sequences: Iterable[Sequence]) -> None:
        """Free the blocks of `sequences`: they have no states any more, and whoever uses one gets `StaleHandle`."""
        found = [seq for seq in sequences if seq.kv is not None]
        if found:
            states = [seq.kv for seq in found]
            tokens = sum([state.len for state in states])
            self._release_batch(states, True)
            self.num_tokens -= tokens
            for seq in found:
                seq.kv = None

    def recount(self, sequences: Iterable[Sequence]) -> None:
        """Drop what an interrupted call held; `sequences` are all that have states."""
        if self.allocator is not None:
            self.block_refs.give_back()
        self.num_tokens = sum([seq.kv.len for seq in sequences])

    def audit(self, states: list[Any]) -> str | None:
        """The first equation that does not hold, `states` being those of all sequences, or None."""
        if self.allocator is not None and len(self.block_refs):
            return f"{len(self.block_refs)} references are held outside of a call"
        if self.num_tokens != sum([state.len for state in states]):
            return f"sequences have {sum([state.len for state in states])} tokens in blocks, not {self.num_tokens}"
        return None


def open_blocks(pool: Any, block_size: int) -> BlockManager:
    """The blocks of `pool`: a `KvCachePool`, a `SequencePool` that has one, a `BlockAllocator`, a manager, or None.

    A pool with a layout decides the block size; `block_size` serves allocators and flat pools.
    """
    if isinstance(pool, BlockManager):
        return pool
    if hasattr(pool, "is_kv_based"):
        pool = pool.kv if pool.is_kv_based else None
    if pool is None:
        return BlockManager(None, block_size)
    allocator = getattr(pool, "allocator", pool)
    if not hasattr(allocator, "free_count"):
        raise TypeError(f"pool must be a KvCachePool, SequencePool or BlockAllocator, not {type(pool).__name__}")
    layout = getattr(pool, "layout", None)
    return BlockManager(allocator, block_size if layout is None else layout.block_size)


def _drivers(allocator: Any) -> tuple[Any, Any, Any]:
    """`PagedSeqState`, `append_batch` and `release_batch` for the states of `allocator`.

    An allocator that is not the compiled one brings its own: they are looked up in the package of its class.
    """
    if isinstance(allocator, BlockAllocator):
        return PagedSeqState, append_batch, release_batch
    package = importlib.import_module(type(allocator).__module__.rpartition(".")[0])
    return package.PagedSeqState, package.append_batch, package.release_batch
