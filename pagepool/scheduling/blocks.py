"""The scheduler's account with a pool: the one place that knows which pool it is and how its states are driven."""

from __future__ import annotations

import importlib
from typing import Any

from pagepool.errors import PoolExhausted
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.batch import append_batch, release_batch
from pagepool.memory.paged_seq import PagedSeqState

__all__ = ["BlockAccount", "NoBlocks", "open_account"]


class NoBlocks:
    """The account of a scheduler without a pool: everything fits and nothing is held."""

    num_tokens = 0

    def refusal(self, max_tokens: int) -> str | None:
        return None

    def free_blocks(self) -> int:
        return 0

    def admits(self, num_tokens: int, promised: int) -> bool:
        return True

    def starts(self, first_chunk: int) -> bool:
        return True

    def blocks_for(self, num_tokens: int) -> int:
        return 0

    def open(self, max_tokens: int) -> None:
        return None

    def needs(self, states: list[Any], counts: list[int]) -> list[int]:
        return [0] * len(states)

    def take(self, states: list[Any], counts: list[int]) -> bool:
        return True

    def give_back(self, states: list[Any]) -> None:
        return None


class BlockAccount:
    """Blocks of one allocator, taken and given back for whole batches.

    `take` is all or nothing. `num_tokens` is the number of tokens in the states that this account opened.
    `watermark` is the share of all blocks that an admission must leave free while others run.
    """

    def __init__(self, allocator: Any, block_size: int, watermark: float = 0.0) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.num_tokens = 0
        self._reserve = int(allocator.capacity * watermark)
        self._make_state, self._append_batch, self._release_batch = _drivers(allocator)

    def refusal(self, max_tokens: int) -> str | None:
        """Why a sequence of `max_tokens` can never run, or None."""
        needed = self.blocks_for(max_tokens)
        capacity = self.allocator.capacity
        if needed <= capacity:
            return None
        return (
            f"{max_tokens} tokens need {needed} blocks of {self.block_size}, "
            f"the pool has {capacity} block{'' if capacity == 1 else 's'}"
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def free_blocks(self) -> int:
        """Blocks that are free now."""
        free: int = self.allocator.free_count
        return free

    def admits(self, num_tokens: int, promised: int) -> bool:
        """True when a prompt of `num_tokens` finds all of its blocks beside others that run: `promised` blocks, which
        prompts already admitted have yet to take, are set aside, and the watermark must be left over.

        Asking for the first chunk alone would admit more prompts than the pool can hold, only to preempt them.
        """
        return self.free_blocks() - promised - self.blocks_for(num_tokens) >= self._reserve

    def starts(self, first_chunk: int) -> bool:
        """True when a prompt finds the blocks of its first chunk. Enough when nothing else runs: a request as large as
        the pool must start, and no watermark can be left then."""
        return self.free_blocks() >= self.blocks_for(first_chunk)

    def open(self, max_tokens: int) -> Any:
        """A new, empty state for at most `max_tokens` tokens."""
        return self._make_state(self.allocator, self.block_size, self.blocks_for(max_tokens))

    def needs(self, states: list[Any], counts: list[int]) -> list[int]:
        """New blocks that `take` would need for each state, apart from reserved blocks and copies of shared ones."""
        blocks_for = self.blocks_for
        lengths = [state.len for state in states]
        return [blocks_for(length + count) - blocks_for(length) for length, count in zip(lengths, counts, strict=True)]

    def take(self, states: list[Any], counts: list[int]) -> bool:
        """Append `counts[i]` tokens to `states[i]` for all; False, with nothing changed, when the pool is out."""
        try:
            self._append_batch(states, counts)
        except PoolExhausted:
            return False
        self.num_tokens += sum(counts)
        return True

    def give_back(self, states: list[Any]) -> None:
        """Release all blocks of `states`, which are closed: whoever kept one and uses it gets `StaleHandle`."""
        tokens = sum([state.len for state in states])
        self._release_batch(states, True)
        self.num_tokens -= tokens


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
