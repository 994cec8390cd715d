"""The scheduler's account with a pool: the one place that knows which pool it is and how its states are driven."""

from __future__ import annotations

import importlib
from typing import Any

from pagepool.errors import PoolExhausted

__all__ = ["BlockAccount", "NoBlocks", "open_account"]


class NoBlocks:
    """The account of a scheduler without a pool: everything fits and nothing is held."""

    num_tokens = 0

    def refusal(self, max_tokens: int) -> str | None:
        return None

    def free_blocks(self) -> int:
        return 0

    def admits(self, first_chunk: int, promised: int, alone: bool) -> bool:
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
        return self.allocator.free_count

    def admits(self, first_chunk: int, promised: int, alone: bool) -> bool:
        """True when the first chunk finds its blocks, `promised` others set aside, with the watermark left over.

        The watermark is not asked for when nothing else runs (`alone`): a request as large as the pool must start.
        """
        left = self.allocator.free_count - promised - self.blocks_for(first_chunk)
        return left >= (0 if alone else self._reserve)

    def open(self, max_tokens: int) -> Any:
        """A new, empty state for at most `max_tokens` tokens."""
        return self._make_state(self.allocator, self.block_size, self.blocks_for(max_tokens))

    def needs(self, states: list[Any], counts: list[int]) -> list[int]:
        """New blocks that `take` would need for each state, copies of shared blocks not counted."""
        size = self.block_size
        return [
            max(0, -(-(state.len + count) // size) - len(state.blocks)) if count else 0
            for state, count in zip(states, counts)
        ]

    def take(self, states: list[Any], counts: list[int]) -> bool:
        """Append `counts[i]` tokens to `states[i]` for all; False when the pool is out, and nothing has changed then."""
        try:
            self._append_batch(states, counts)
        except PoolExhausted:
            return False
        self.num_tokens += sum(counts)
        return True

    def give_back(self, states: list[Any]) -> None:
        """Release all blocks of `states`."""
        tokens = sum([state.len for state in states])
        self._release_batch(states)
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
    """`PagedSeqState`, `append_batch` and `release_batch` that go with `allocator`: those of the package that its class
    lives in, so that the pure-Python allocator gets pure-Python states without this module knowing it."""
    package = importlib.import_module(type(allocator).__module__.rpartition(".")[0])
    return package.PagedSeqState, package.append_batch, package.release_batch
