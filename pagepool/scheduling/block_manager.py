"""The blocks of running sequences. Only this module knows the kind of a scheduler's pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pagepool._arguments import wrong
from pagepool.errors import PoolExhausted
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.batch import append_batch, release_batch
from pagepool.memory.block_refs import BlockRefs
from pagepool.memory.block_table import PagedSeqState
from pagepool.memory.hybrid import HybridSequence, KvGroup, groups_of
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.scheduling.request import Sequence

__all__ = ["BlockManager", "HybridBlocks", "open_blocks"]

DEFAULT_BLOCK_SIZE = 16


class BlockManager:
    """Takes and frees blocks of one allocator for whole batches, all or nothing.

    Attributes
    ----------
    allocator : BlockAllocator or None
        None: everything fits, and sequences have no states.
    block_size : int
        Tokens per block. The constructor's default is the block size of the allocator's pools, or 16. It raises
        ValueError for another size.
    sizes : list of int
        Tokens per block for each group of a sequence.
    states : SsmStatePool or None
        The pool of recurrent states.
    has_states : bool
        Sequences have a `kv`.
    step : int
        Maximum number of tokens of a sequence per step, 0 for no bound.
    can_cut : bool
        A sequence can free its last blocks and keep the first ones.
    cache : PrefixCache or None
        Its evictable blocks count as available.
    num_tokens : int
        Sum of `kv.len` over all sequences.
    evicted : int
        Number of cached blocks that `append` has evicted.
    block_refs : list of BlockRefs
        References that are taken and dropped within one call, for each group.
    """

    states: SsmStatePool | None = None
    step = 0
    can_cut = True
    cache: Any = None

    def __init__(self, allocator: BlockAllocator | None, block_size: int | None) -> None:
        if allocator is not None:
            block_size = PagedSeqState(allocator, block_size, 0).block_size
        size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
        self._set_up(allocator, size, [size])
        self.has_states = allocator is not None

    def _set_up(self, allocator: BlockAllocator | None, block_size: int, sizes: list[int]) -> None:
        self.allocator: Any = allocator
        self.block_size = block_size
        self.sizes = sizes
        self.capacity = 0 if allocator is None else allocator.max_capacity
        self.num_tokens = 0
        self.evicted = 0
        self.block_refs = [] if allocator is None else [self._open_refs() for _ in sizes]

    @property
    def free_slots(self) -> int | None:
        """Number of free slots for recurrent states, or None if sequences do not need slots."""
        return None if self.states is None else int(self.states.free_count)

    def refusal(self, max_tokens: int) -> str | None:
        """Return the reason why a sequence of `max_tokens` can never run, or None."""
        needed, capacity = self.blocks_for(max_tokens), self.capacity
        if needed <= capacity or self.allocator is None:
            return None
        size = f"of {self.block_size}" if len(self.sizes) == 1 else f"in {len(self.sizes)} groups"
        return (
            f"{max_tokens} tokens need {needed} blocks {size}, "
            f"the pool has {capacity} block{'' if capacity == 1 else 's'}"
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the maximum number of blocks of a sequence with `num_tokens` tokens."""
        return 0 if self.allocator is None else -(-num_tokens // self.block_size)

    def held(self, seq: Sequence) -> int:
        """Return the number of blocks of `seq`."""
        return self.blocks_for(seq.fed)

    def table(self, seq: Sequence, group: int) -> tuple[Any, int]:
        """Return the block table of a group, and the place of the first block that a window has not freed."""
        return seq.kv.block_table, seq.kv.first_block

    def needed(self, state: Any, count: int) -> int:
        """Return the number of new blocks that `append` takes for `count` tokens, without copies of shared blocks."""
        return self.blocks_for(state.len + count) - self.blocks_for(state.len)

    def available(self) -> int:
        """Return the number of blocks that can be taken: free, evictable, or by growth of the pool."""
        if self.allocator is None:
            return 0
        available: int = self.allocator.available
        return available if self.cache is None else available + self.cache.evictable

    def can_take(self, n: int) -> bool:
        """Return true if `n` blocks are available. A pool with a memory budget grows if they are not."""
        missing = n - self.available()
        return missing <= 0 or (self._extend(missing, takes=True) and self.available() >= n)

    def open(self, seq: Sequence) -> None:
        """Give `seq` an empty state with room for its `max_tokens`."""
        if self.has_states:
            seq.kv = self._open_state(self.blocks_for(seq.max_tokens))
            seq.kv.label = seq._label

    def adopt(self, seq: Sequence, blocks: list[Any]) -> None:
        """Replace the blocks of `seq` by full shared blocks. `blocks` has a row for each group."""
        self.num_tokens -= seq.kv.len
        self._release_batch([seq.kv], False)
        seq.kv.adopt(blocks[0])
        self.num_tokens += seq.kv.len

    def fork(self, seq: Sequence, fork: Sequence) -> None:
        """Give `fork` a state with the blocks of the tokens that `seq` was fed."""
        if seq.kv is None:
            return
        fork.kv = self._fork(seq.kv, fork._label)
        self.num_tokens += fork.kv.len
        if fork.kv.len > seq.fed:  # slots of drafts
            self.truncate(fork, seq.fed)

    def append(self, states: list[Any], counts: list[int], drafts: list[int]) -> bool:
        """Append `counts[i]` tokens to `states[i]`, all or nothing. Evicts cached blocks if needed.

        A pool with a memory budget first takes what is left of the budget, then its own cached blocks, then idle blocks
        of other pools. `drafts[i]` of the tokens are drafts. Returns False if the pool has too few blocks.
        """
        while self.has_states:
            try:
                self._append_batch(states, counts)
            except PoolExhausted:
                needed = sum(map(self.needed, states, counts))
                # At least one block: `needed` does not count copies of shared blocks.
                missing = max(1, needed - self.allocator.available)
                if self._extend(missing, takes=False):
                    continue
                evicted = 0 if self.cache is None else self.cache.evict(missing)
                self.evicted += evicted
                if not evicted and not self._extend(missing, takes=True):
                    return False
            else:
                self.num_tokens += sum(counts)
                break
        return True

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of `seq`."""
        self.num_tokens -= seq.kv.len - num_tokens
        self._truncate(seq.kv, num_tokens)

    def remove_slots(self, sequences: Iterable[Sequence]) -> None:
        """Keep the fed tokens of `sequences`: remove the slots of rejected drafts."""
        for seq in sequences:
            if seq.kv is not None and seq.kv.len > seq.fed:
                self.truncate(seq, seq.fed)

    def close(self, sequences: Iterable[Sequence]) -> None:
        """Free the blocks of `sequences` and close their states. Later calls of these states raise `StaleHandle`."""
        found = [seq for seq in sequences if seq.kv is not None]
        if found:
            states = [seq.kv for seq in found]
            tokens = sum([state.len for state in states])
            self._release_batch(states, True)
            self.num_tokens -= tokens
            for seq in found:
                seq.kv = None

    def give_back(self) -> None:
        """Drop the references in `block_refs`."""
        for refs in self.block_refs:
            refs.give_back()

    def free_all(self, sequences: Iterable[Sequence]) -> None:
        """Free the blocks of all `sequences`, and the references of an interrupted call."""
        for seq in sequences:
            if seq.kv is not None:
                seq.kv.close()
                seq.kv = None
        self.give_back()
        self.num_tokens = 0

    def audit(self, states: list[Any]) -> str | None:
        """Return the first broken invariant, or None. `states` are the states of all sequences."""
        held = sum(map(len, self.block_refs))
        if held:
            return f"{held} references are held outside of a call"
        if self.num_tokens != sum([state.len for state in states]):
            return f"sequences have {sum([state.len for state in states])} tokens in blocks, not {self.num_tokens}"
        return None

    def _extend(self, missing: int, takes: bool) -> bool:
        pages = None if self.allocator is None else self.allocator.shared_pages
        return pages is not None and pages.extend(missing, takes) > 0

    def _append_batch(self, states: list[Any], counts: list[int]) -> None:
        append_batch(states, counts)

    def _release_batch(self, states: list[Any], close: bool) -> None:
        release_batch(states, close)

    def _open_state(self, max_blocks: int) -> Any:
        return PagedSeqState(self.allocator, self.block_size, max_blocks)

    def _open_refs(self) -> Any:
        return BlockRefs(self.allocator)

    def _truncate(self, state: Any, num_tokens: int) -> None:
        state.truncate(num_tokens)

    def _fork(self, state: Any, label: int | str) -> Any:
        fork = state.fork()
        fork.label = label
        return fork


class HybridBlocks(BlockManager):
    """A block manager for `HybridSequence`: `groups` over one allocator, and an optional pool of recurrent `states`.

    The blocks of all groups are counted together. A step adds at most `step` tokens, so a window of w tokens never has
    more than ceil((w + step) / block_size) + 1 blocks: for the tokens that the first new token sees, and for the new
    tokens. Recurrent states cannot be truncated, and neither can windows that have freed blocks. So a preempted
    sequence frees all its blocks.
    """

    can_cut = False
    has_states = True

    def __init__(
        self,
        allocator: BlockAllocator | None,
        block_size: int | None,
        groups: tuple[KvGroup, ...],
        states: SsmStatePool | None,
        step: int,
    ) -> None:
        self.groups = groups
        self.states = states
        self.step = step
        tables = HybridSequence(groups)  # a temporary sequence, to read the block size of each group
        sizes = [table.block_size for table in tables.kv]
        tables.close()
        self.most = [
            None if group.window is None else -(-(group.window + step) // size) + 1
            for group, size in zip(groups, sizes, strict=True)
        ]
        known = sorted(set(sizes))
        if block_size is not None and known not in ([], [block_size]):
            theirs = " and ".join(map(str, known))
            raise ValueError(f"block_size is {block_size}, the groups have blocks of {theirs} tokens")
        self._set_up(allocator, known[0] if len(known) == 1 else block_size or DEFAULT_BLOCK_SIZE, sizes)

    def refusal(self, max_tokens: int) -> str | None:
        """See `BlockManager`."""
        if self.states is not None and not self.states.capacity:
            return "a sequence needs 1 slot for its recurrent state, the pool has 0"
        for place, (group, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
            most = group.max_blocks_per_seq
            if most is not None and -(-max_tokens // size) > most:
                return f"{max_tokens} tokens need {-(-max_tokens // size)} blocks of {size}, groups[{place}] has {most}"
        return super().refusal(max_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """See `BlockManager`."""
        total = 0
        for size, most in zip(self.sizes, self.most, strict=True):
            count = -(-num_tokens // size)
            total += count if most is None or count < most else most
        return total

    def needed(self, state: HybridSequence, count: int) -> int:
        """See `BlockManager`. Subtracts the blocks that windows free for these tokens."""
        total = 0
        for table, start in zip(state.kv, state._starts(), strict=True):
            size, length = table.block_size, table.len
            total += -(-(length + count) // size) - -(-length // size)
            left = start // size - table.first_block
            if left > 0:
                total -= sum([table.allocator.ref_count(block) == 1 for block in table.blocks[:left]])
        return max(0, total)

    def held(self, seq: Sequence) -> int:
        """See `BlockManager`."""
        return sum(len(table.blocks) for table in seq.kv.kv)

    def table(self, seq: Sequence, group: int) -> tuple[Any, int]:
        """See `BlockManager`."""
        table = seq.kv.kv[group]
        return table.block_table, table.first_block

    def open(self, seq: Sequence) -> None:
        """See `BlockManager`."""
        sizes = zip(self.groups, self.sizes, strict=True)
        groups = [replace(group, max_blocks_per_seq=-(-seq.max_tokens // size)) for group, size in sizes]
        seq.kv = HybridSequence(groups, self.states, label=seq._label)

    def adopt(self, seq: Sequence, blocks: list[Any]) -> None:
        """See `BlockManager`. Windows keep the tokens that the next token sees."""
        self.num_tokens -= seq.kv.len
        seq.kv.adopt(blocks, len(blocks[0]) * self.block_size)
        seq.kv.trim()
        self.num_tokens += seq.kv.len

    def append(self, states: list[HybridSequence], counts: list[int], drafts: list[int]) -> bool:
        """See `BlockManager`. Takes a slot for the recurrent state after each draft."""
        if not super().append(states, counts, drafts):
            return False
        if self.states is None or not any(drafts):
            return True
        try:
            for state, number in zip(states, drafts, strict=True):
                state.hold_drafts(number)
        except PoolExhausted:  # another user of the pool has taken slots since `build_batch`
            for state, count in zip(states, counts, strict=True):
                state.retract(state.len - count)
            self.num_tokens -= sum(counts)
            return False
        return True

    def remove_slots(self, sequences: Iterable[Sequence]) -> None:
        """See `BlockManager`. The recurrent states become those after the accepted drafts."""
        for seq in sequences:
            if seq.kv is not None and (seq.kv.drafts or seq.kv.len > seq.fed):
                self.truncate(seq, seq.fed)

    def _append_batch(self, states: list[HybridSequence], counts: list[int]) -> None:
        before = [state.len for state in states]
        # Upper bound: a table takes at most 2 more blocks than its tokens fill, and 1 copy. Saves 12 of 15 us a row.
        most = sum([sum(counts) // size + 3 * len(counts) for size in self.sizes])
        try:
            if self.sizes and most > self.allocator.available:
                needed, available = sum(map(self._blocks_and_copies, states, counts)), self.allocator.available
                if needed > available:
                    raise PoolExhausted(f"{len(states)} sequences need {needed} blocks, {available} are available")
            for state, count in zip(states, counts, strict=True):
                state.append(count)
        except PoolExhausted:  # too few blocks, or another thread has taken blocks since the check
            for state, length in zip(states, before, strict=True):
                if state.len > length:
                    state.retract(length)
                state.trim()  # makes cached blocks before the windows evictable
            raise

    def _blocks_and_copies(self, state: HybridSequence, count: int) -> int:
        """Return `needed` plus the copies of shared blocks."""
        tables = state.kv if count else ()
        cut = [table for table in tables if table.len % table.block_size]
        return self.needed(state, count) + sum([t.allocator.ref_count(t.blocks[-1]) > 1 for t in cut])

    def _release_batch(self, states: list[HybridSequence], close: bool) -> None:
        for state in states:
            state.close()

    def _truncate(self, state: HybridSequence, num_tokens: int) -> None:
        state.retract(num_tokens)

    def _fork(self, state: HybridSequence, label: int | str) -> HybridSequence:
        return state.fork(label)


def open_blocks(
    pool: Any, block_size: int | None, groups: Iterable[KvGroup] | None = None, states: Any = None, step: int = 1
) -> BlockManager:
    """Return the block manager of a pool.

    `pool` is a `KvCachePool`, a `SequencePool` with one, a `BlockAllocator`, a `BlockManager`, or None. `block_size`
    None means the block size of the pool or the groups, or 16. Another size than theirs raises ValueError. With
    `groups` or `states`, sequences are `HybridSequence`s and get at most `step` tokens per step.
    """
    if isinstance(pool, BlockManager):
        return pool
    if hasattr(pool, "is_kv_based"):
        pool = pool.kv if pool.is_kv_based else None
    allocator = getattr(pool, "allocator", pool)
    if pool is not None and not isinstance(allocator, BlockAllocator):
        raise TypeError(f"pool must be a KvCachePool, SequencePool or BlockAllocator, not {type(pool).__name__}")
    if groups is None and states is None:
        return BlockManager(allocator, block_size)
    if states is not None and not isinstance(states, SsmStatePool):
        raise wrong("states", "an SsmStatePool or None", states)
    if groups is None:
        groups = () if allocator is None else (KvGroup(allocator, block_size),)
    found = groups_of(groups)
    for place, group in enumerate(found):
        allocator = group.allocator if allocator is None else allocator
        if group.allocator is not allocator:
            raise ValueError(f"groups[{place}] has another allocator than the pool or the groups before it")
    return HybridBlocks(allocator, block_size, found, states, step)
