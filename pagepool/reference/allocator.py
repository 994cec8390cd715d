"""The block allocator in plain Python: hands out block ids and counts the references to each.

Invariants, which `check()` verifies:

    free_count + in_use == capacity
    free_count == len(free list) + (capacity - fresh)
    ref_count(b) == 0  exactly for the blocks of the free list and for b >= fresh
    no block is in the free list twice
    ref_count(b) == references of sequences and caches + references of other owners
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import numpy as np

from pagepool._arguments import integer
from pagepool.errors import InvalidBlock, PoolError, PoolExhausted

__all__ = ["BlockAllocator"]

MAX_BLOCKS = 2**31 - 1


class BlockAllocator:
    """Hands out the ids 0 .. num_blocks - 1 and counts the references to each.

    A fresh allocator hands out 0, 1, 2, ...; later the most recently freed block first. Every call checks all arguments
    before it changes anything.

    >>> allocator = BlockAllocator(4)
    >>> allocator.allocate(), allocator.allocate_n(2).tolist(), allocator.free_count
    (0, [1, 2], 1)
    >>> allocator.free([0, 2])
    >>> allocator.allocate(), allocator.allocate()
    (2, 0)
    """

    def __init__(self, num_blocks: int, max_blocks: int | None = None) -> None:
        self.capacity = integer("num_blocks", num_blocks, 0, MAX_BLOCKS)
        self.max_capacity = self.capacity if max_blocks is None else integer("max_blocks", max_blocks, 0, MAX_BLOCKS)
        if self.max_capacity < self.capacity:
            raise ValueError(f"max_blocks must be at least {self.capacity}, not {self.max_capacity}")
        self.peak_in_use = 0
        self._fresh = 0  # the lowest id that was never handed out
        self._freed: list[int] = []  # the block freed last comes last
        self._refs: list[int] = []  # reference counts of the blocks below _fresh
        self.attached: WeakSet[Any] = WeakSet()  # pools: copy_page copies the page in each
        self._owners: WeakSet[Any] = WeakSet()  # sequences and caches

    def read_block_size(self, block_size: int | None) -> int:
        """Return the block size for a new owner: `block_size`. For None: the block size of an attached pool, or 16."""
        pools = max((int(pool.layout.block_size) for pool in self.attached), default=0)
        if block_size is None:
            return pools or 16
        integer("block_size", block_size, 1, 1024)
        if pools and block_size != pools:
            raise ValueError(f"block_size must be {pools}, the block size of the allocator's pool, not {block_size}")
        return block_size

    @property
    def free_count(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._freed) + self.capacity - self._fresh

    @property
    def in_use(self) -> int:
        """Number of blocks with at least one reference."""
        return self._fresh - len(self._freed)

    @property
    def available(self) -> int:
        """Number of free blocks, plus the number of blocks that the capacity may still grow by."""
        return self.free_count + self.max_capacity - self.capacity

    def grow(self, num_blocks: int) -> None:
        """Raise the capacity to `num_blocks`. Raises `ValueError` below the present capacity or above the maximum."""
        number = integer("num_blocks", num_blocks, 0, self.max_capacity)
        if number < self.capacity:
            raise ValueError(f"num_blocks must be from {self.capacity} to {self.max_capacity}, not {number}")
        self.capacity = number

    def shrink(self, num_blocks: int = 0) -> int:
        """Lower the capacity to `num_blocks`, but not below a block in use; return the new capacity."""
        number = integer("num_blocks", num_blocks, 0, self.capacity)
        while self._fresh > number and not self._refs[-1]:
            self._fresh -= 1
            self._refs.pop()
            self._freed.remove(self._fresh)
        self.capacity = max(number, self._fresh)
        return self.capacity

    def allocate(self) -> int:
        """Take one block, with one reference. Raises `PoolExhausted` if no block is free."""
        if not self.available:
            raise PoolExhausted(f"asked for 1 block, 0 of {self.max_capacity} are free")
        return self._take()

    def allocate_n(self, n: int) -> np.ndarray:
        """Take `n` blocks, all or nothing: int32 `(n,)`, in the order in which `allocate` would return them.

        Raises `PoolExhausted` if fewer blocks are free, `ValueError` for a negative n.
        """
        n = integer("n", n, 0)
        self.demand(n)
        return np.array([self._take() for _ in range(n)], dtype=np.int32)

    def free(self, blocks: int | Iterable[int]) -> None:
        """Drop one reference of each block. A block without references is free; the last one is allocated next.

        Raises `InvalidBlock`, and drops no reference, if a block is out of range, free, or listed more often than it
        has references.
        """
        ids = self._held(blocks)
        if len(ids) > 1:
            for block, times in Counter(ids).items():
                if times > self._refs[block]:
                    raise InvalidBlock(f"block {block} is freed {times} times, but has {self._refs[block]} references")
        for block in ids:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._freed.append(block)

    def share(self, blocks: int | Iterable[int]) -> None:
        """Add one reference to each block. Raises `InvalidBlock`, and adds none, if one is out of range or free."""
        for block in self._held(blocks):
            self._refs[block] += 1

    def ref_count(self, block: int) -> int:
        """Return the reference count of `block`, 0 for a free block. Raises `InvalidBlock` if it is out of range."""
        block = self._in_range(block)
        return self._refs[block] if block < self._fresh else 0

    def add_owner(self, holder: Any) -> None:
        """Register an owner of blocks: it has `kind`, `label` and `references()`, which lists an id per reference."""
        self._owners.add(holder)

    def owners(self, block: int) -> list[tuple[str, Any, int, Any]]:
        """Return the owners of a block: kind, label, references, owner. The references add up to `ref_count(block)`."""
        found = [(holder.kind, holder.label, holder.references().count(block), holder) for holder in self._owners]
        found = [owner for owner in found if owner[2]]
        others = self.ref_count(block) - sum(owner[2] for owner in found)
        return found + [("other", None, others, None)] * (others > 0)

    def check(self, others: int | None = None) -> None:
        """Raise `PoolError` if an invariant above is broken.

        `others` is the number of references without a registered owner, if the caller knows it.
        """
        held = Counter(block for holder in self._owners for block in holder.references())
        if any(times > self.ref_count(block) for block, times in held.items()):
            raise PoolError("a block has fewer references than its owners report")
        if others is not None and sum(self._refs) - sum(held.values()) != others:
            raise PoolError(f"{sum(self._refs) - sum(held.values())} references have no owner, expected {others}")
        if self.free_count + self.in_use != self.capacity or not 0 <= self._fresh <= self.capacity:
            raise PoolError(f"{self.free_count} free + {self.in_use} in use are not {self.capacity} blocks")
        if len(set(self._freed)) != len(self._freed):
            raise PoolError("a block is in the free list twice")
        unreferenced = {block for block, refs in enumerate(self._refs) if refs == 0}
        if min(self._refs, default=0) < 0 or unreferenced != set(self._freed):
            raise PoolError(f"{len(unreferenced)} blocks have no reference, {len(self._freed)} are in the free list")

    def demand(self, n: int) -> None:
        """Raise `PoolExhausted`, with both numbers, if fewer than `n` blocks are available."""
        if n > self.available:
            raise PoolExhausted(f"asked for {n} blocks, {self.available} of {self.max_capacity} are free")

    def copy_page(self, dst: int, src: int) -> None:
        """Copy page `src` over page `dst` in every attached pool."""
        for pool in self.attached:
            pool.copy_page(dst, src)

    def _take(self) -> int:
        if self._freed:
            block = self._freed.pop()
            self._refs[block] = 1
        else:
            block = self._fresh
            self._fresh += 1
            self.capacity = max(self.capacity, self._fresh)
            self._refs.append(1)
        if self.in_use > self.peak_in_use:
            self.peak_in_use = self.in_use
        return block

    def _in_range(self, block: int) -> int:
        number = operator.index(block)
        if not 0 <= number < self.capacity:
            raise InvalidBlock(f"block {number} is out of range: there are {self.capacity} blocks")
        return number

    def _held(self, blocks: int | Iterable[int]) -> list[int]:
        """Return `blocks` as a list of ids. Raises `InvalidBlock` unless all of them have a reference."""
        ids = [self._in_range(block) for block in (blocks if hasattr(blocks, "__iter__") else [blocks])]
        for block in ids:
            if block >= self._fresh or not self._refs[block]:
                raise InvalidBlock(f"block {block} is not allocated")
        return ids
