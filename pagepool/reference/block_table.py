"""Sequences in plain Python: the map from a sequence's tokens to blocks.

logical block   0     1     2          tokens 0 .. len - 1 lie in the first ceil(len / block_size) blocks;
blocks        [ 7  |  2  |  9  ]       those after them are reserved
block_table   [ 7  ,  2  ,  9  ,  0, 0, ... ]      zero-padded to max_blocks_per_seq
slot of token t = blocks[t // block_size] * block_size + t % block_size
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pagepool.reference.allocator import BlockAllocator, count_of

__all__ = ["BlockTables", "PagedSeqState", "append_batch", "release_batch"]


class PagedSeqState:
    """One sequence's blocks, bound to the allocator that they come from; they go back when nothing refers to it.

    >>> allocator = BlockAllocator(4)
    >>> parent = PagedSeqState(allocator, block_size=2)
    >>> parent.append(3).tolist(), parent.blocks, parent.len
    ([0, 1, 2], [0, 1], 3)
    >>> child = parent.fork()
    >>> child.append().tolist(), child.blocks  # block 1 was shared: the child takes block 2 before it writes
    ([5], [0, 2])
    """

    def __init__(self, allocator: BlockAllocator, block_size: int = 16, max_blocks_per_seq: int | None = None) -> None:
        self.allocator = allocator
        self.block_size = count_of("block_size", block_size, 1024)
        if not self.block_size:
            raise ValueError("block_size must be from 1 to 1024, not 0")
        limit = allocator.capacity if max_blocks_per_seq is None else max_blocks_per_seq
        self.max_blocks_per_seq = count_of("max_blocks_per_seq", limit)
        self.len = 0
        self._blocks: list[int] = []
        self._table = np.zeros(self.max_blocks_per_seq, dtype=np.int32)

    def __del__(self) -> None:
        if hasattr(self, "_table"):  # the last thing that __init__ makes
            self.release()

    @property
    def blocks(self) -> list[int]:
        """The ids, reserved ones included, as a new list."""
        return list(self._blocks)

    @property
    def block_table(self) -> memoryview:
        """The live int32 table, zero-padded to `max_blocks_per_seq`."""
        return self._table.data

    @property
    def context_len(self) -> int:
        """The same as `len`."""
        return self.len

    def ensure_capacity(self, target_len: int) -> None:
        """Reserves blocks for `target_len` tokens. Never changes `len`, never gives blocks back; all or nothing.

        Raises `ValueError` past `max_blocks_per_seq`, `PoolExhausted` when the allocator has too few.
        """
        self._extend(self._missing(count_of("target_len", target_len)))

    def append(self, n: int = 1) -> np.ndarray:
        """Adds `n` tokens and returns their slots, int64 `(n,)`.

        Reserves what is missing. A block that will be written and that others hold too is replaced: a new block, a
        copy of the page in every attached pool if it holds tokens, and then one reference less on the old one. Of the
        new ids, those that replace shared blocks come first. Raises as `ensure_capacity`, and changes nothing then.
        """
        n = count_of("n", n)
        missing = self._missing(self.len + n)
        shared = self._shared(n)
        self.allocator.demand(missing + len(shared))
        for index in shared:
            old, new = self._blocks[index], self.allocator.allocate()
            if index * self.block_size < self.len:
                self.allocator.copy_page(new, old)
            self._blocks[index] = self._table[index] = new
            self.allocator.free(old)
        self._extend(missing)
        first, self.len = self.len, self.len + n
        return np.array([self.slot(token) for token in range(first, self.len)], dtype=np.int64)

    def truncate(self, len: int) -> None:
        """Shortens to `len` tokens and gives back every block behind them, reserved ones too.

        Raises `ValueError` when `len` is negative or above the present one.
        """
        self._keep(count_of("len", len, self.len))

    def fork(self) -> PagedSeqState:
        """A sequence with the same tokens: it shares the blocks that hold tokens; reserved ones stay here."""
        child = PagedSeqState(self.allocator, self.block_size, self.max_blocks_per_seq)
        shared = self._blocks[: self._needed(self.len)]
        self.allocator.share(shared)
        child._blocks = shared
        child._table[: len(shared)] = shared
        child.len = self.len
        return child

    def adopt(self, blocks: Sequence[int], num_tokens: int | None = None) -> None:
        """Begins an empty sequence with `num_tokens` tokens that are in `blocks` already; shares them.

        Raises `ValueError` when it is not empty, or the blocks are not as many as the tokens need or than it may have.
        """
        ids = [int(block) for block in blocks]
        tokens = count_of("num_tokens", len(ids) * self.block_size if num_tokens is None else num_tokens)
        if self._blocks:
            raise ValueError(f"cannot adopt blocks: the sequence has {len(self._blocks)} of its own")
        if self._needed(tokens) != len(ids):
            raise ValueError(f"{tokens} tokens are not what {len(ids)} blocks of {self.block_size} hold")
        self._missing(tokens)
        self.allocator.share(ids)
        self._blocks = ids
        self._table[: len(ids)] = ids
        self.len = tokens

    def release(self) -> None:
        """Gives all blocks back; `len` becomes 0 and the sequence can be used again."""
        self._keep(0)

    def slot(self, token: int) -> int:
        """The slot of a token."""
        return self._blocks[token // self.block_size] * self.block_size + token % self.block_size

    def _keep(self, tokens: int) -> None:
        kept = self._needed(tokens)
        dropped = self._blocks[kept:]
        self.allocator.free(dropped)
        del self._blocks[kept:]
        self._table[kept : kept + len(dropped)] = 0
        self.len = tokens

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _missing(self, tokens: int) -> int:
        """Blocks to take for a length of `tokens`."""
        needed = self._needed(tokens)
        if needed > self.max_blocks_per_seq:
            raise ValueError(f"{tokens} tokens need {needed} blocks, a sequence has at most {self.max_blocks_per_seq}")
        return max(0, needed - len(self._blocks))

    def _shared(self, n: int) -> list[int]:
        """Places of the blocks that `append(n)` writes and that others hold too."""
        if not n:
            return []
        last = min(self._needed(self.len + n), len(self._blocks))
        places = range(self.len // self.block_size, last)
        return [place for place in places if self.allocator.ref_count(self._blocks[place]) > 1]

    def _extend(self, missing: int) -> None:
        if missing:
            held = len(self._blocks)
            self._blocks += self.allocator.allocate_n(missing).tolist()
            self._table[held : held + missing] = self._blocks[held:]


def append_batch(states: Sequence[PagedSeqState], counts: Sequence[int]) -> None:
    """Appends `counts[i]` tokens to `states[i]`, in order, for all of them or for none.

    Raises `PoolExhausted` when the allocator has too few blocks for all, `ValueError` when the lists differ in
    length, a state appears twice, a count is negative or a state would pass its maximum.
    """
    _distinct(states)
    if len(states) != len(counts):
        raise ValueError(f"{len(states)} states but {len(counts)} counts")
    wanted: Counter[BlockAllocator] = Counter()
    dropped: Counter[tuple[BlockAllocator, int]] = Counter()  # references that earlier states will have dropped
    for state, count in zip(states, counts, strict=True):
        count = count_of("count", count)
        wanted[state.allocator] += state._missing(state.len + count)
        for place in state._shared(count):
            key = (state.allocator, state._blocks[place])
            if state.allocator.ref_count(key[1]) - dropped[key] > 1:
                dropped[key] += 1
                wanted[state.allocator] += 1
    for allocator, blocks in wanted.items():
        allocator.demand(blocks)
    for state, count in zip(states, counts, strict=True):
        state.append(count)


def release_batch(states: Sequence[PagedSeqState]) -> None:
    """Releases every state. Raises `ValueError`, and releases none, when one appears twice."""
    _distinct(states)
    for state in states:
        state.release()


def _distinct(states: Sequence[Any]) -> None:
    if len({id(state) for state in states}) != len(states):
        raise ValueError("a state appears twice")


class BlockTables:
    """The rows that a step's kernels read, filled from the states of a batch.

    >>> state = PagedSeqState(BlockAllocator(4), block_size=2)
    >>> slots = state.append(3)
    >>> tables = BlockTables(max_seqs=2, max_blocks_per_seq=4).fill([state], [2])
    >>> tables.block_tables.tolist(), tables.seq_lens.tolist(), tables.slot_mapping.tolist()
    ([[0, 1, 0, 0]], [3], [1, 2])
    """

    def __init__(self, max_seqs: int, max_blocks_per_seq: int) -> None:
        self.max_seqs = count_of("max_seqs", max_seqs)
        self.max_blocks_per_seq = count_of("max_blocks_per_seq", max_blocks_per_seq)
        self._set([], [])

    def fill(self, states: Any, num_tokens: Sequence[int] | None = None) -> BlockTables:
        """Rows of the blocks that hold tokens, in the order of `states` or of a `ScheduledBatch`; returns itself.

        `slot_mapping` and `query_start_loc` cover the last `num_tokens[i]` tokens of each state (None: one each, none
        of an empty state; a batch brings its own). Raises `ValueError` when there are more states than `max_seqs`, a
        state has more of those blocks than a row, or more tokens are asked for than it has; nothing changes then.
        """
        if hasattr(states, "states"):
            states, num_tokens = states.states, states.num_tokens
        if num_tokens is None:
            num_tokens = [min(1, state.len) for state in states]
        if len(states) > self.max_seqs:
            raise ValueError(f"{len(states)} states, at most {self.max_seqs}")
        if len(num_tokens) != len(states):
            raise ValueError(f"{len(states)} states but {len(num_tokens)} numbers of tokens")
        for state, tokens in zip(states, num_tokens, strict=True):
            count_of("num_tokens", tokens, state.len)
            if state._needed(state.len) > self.max_blocks_per_seq:
                raise ValueError(f"{state.len} tokens do not fit into a row of {self.max_blocks_per_seq} blocks")
        self._set(states, num_tokens)
        return self

    def _set(self, states: Sequence[PagedSeqState], num_tokens: Sequence[int]) -> None:
        width = self.max_blocks_per_seq
        rows = [state.blocks[: state._needed(state.len)] for state in states]
        rows = [row + [0] * (width - len(row)) for row in rows]
        starts = list(accumulate(num_tokens, initial=0))
        slots = []
        for state, tokens in zip(states, num_tokens, strict=True):
            slots += [state.slot(token) for token in range(state.len - tokens, state.len)]
        self.block_tables = np.array(rows, dtype=np.int32).reshape(len(rows), width)
        self.seq_lens = np.array([state.len for state in states], dtype=np.int32)
        self.slot_mapping = np.array(slots, dtype=np.int64)
        self.query_start_loc = np.array(starts, dtype=np.int32)
