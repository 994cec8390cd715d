"""Sequences in plain Python: the map from a sequence's tokens to blocks.

logical block   0     1     2          tokens 0 .. len - 1 are in the first ceil(len / block_size) blocks;
blocks        [ 7  |  2  |  9  ]       later blocks are reserved
block_table   [ 7  ,  2  ,  9  ,  0, 0, ... ]      zero-padded to max_blocks_per_seq
slot of token t: blocks[t // block_size] * block_size + t % block_size

Blocks before a sliding window may be freed. Their entries in the table are -1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pagepool._arguments import integer
from pagepool.errors import StaleHandle
from pagepool.reference.allocator import BlockAllocator

__all__ = ["BlockTables", "PagedSeqState"]


class PagedSeqState:
    """The blocks of one sequence. They are freed when the last reference to this object is dropped.

    >>> allocator = BlockAllocator(4)
    >>> parent = PagedSeqState(allocator, block_size=2)
    >>> parent.append(3).tolist(), parent.blocks, parent.len
    ([0, 1, 2], [0, 1], 3)
    >>> child = parent.fork()
    >>> child.append().tolist(), child.blocks  # block 1 was shared: the child takes block 2 before it writes
    ([5], [0, 2])
    """

    kind = "sequence"

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int | None = None,
        max_blocks_per_seq: int | None = None,
        label: int | str | None = None,
    ) -> None:
        if not isinstance(label, (int, str, type(None))):
            raise TypeError(f"a label must be an int, a str or None, not {type(label).__name__}")
        self.allocator = allocator
        self.label = label
        self.block_size = allocator.read_block_size(block_size)
        limit = allocator.max_capacity if max_blocks_per_seq is None else max_blocks_per_seq
        self.max_blocks_per_seq = integer("max_blocks_per_seq", limit, 0)
        self.len = 0
        self.first_block = 0
        self.closed = False
        self._blocks: list[int] = []  # block of each logical block, -1 before first_block
        self._table = np.zeros(self.max_blocks_per_seq, dtype=np.int32)
        allocator.add_owner(self)

    def __del__(self) -> None:
        if hasattr(self, "_table") and not self.closed:  # without `_table`, the constructor has raised
            self.release()

    @property
    def blocks(self) -> list[int]:
        """The ids from `first_block` on, reserved ones included, as a new list."""
        return self._blocks[self.first_block :]

    def references(self) -> list[int]:
        """Return the ids of the blocks that this sequence has references to."""
        return self.blocks

    @property
    def block_table(self) -> memoryview:
        """The live int32 table, read-only and zero-padded to `max_blocks_per_seq`."""
        return self._table.data.toreadonly()

    @property
    def context_len(self) -> int:
        """The same as `len`."""
        return self.len

    def ensure_capacity(self, target_len: int) -> None:
        """Reserve blocks for `target_len` tokens, all or nothing. Never changes `len`, never frees blocks.

        Raises `ValueError` above `max_blocks_per_seq`, `PoolExhausted` if the allocator has too few blocks.
        """
        missing = self._missing(integer("target_len", target_len, 0))
        self._extend(missing, iter(self.allocator.allocate_n(missing).tolist()))

    def append(self, n: int = 1) -> np.ndarray:
        """Add `n` tokens and return their slots, int64 `(n,)`.

        Reserves missing blocks. A shared block that will be written is replaced by a new block (copy on write). If the
        old block holds tokens of this sequence, its page is copied in every attached pool. Then one reference of the
        old block is dropped. The first new ids replace shared blocks, later ids extend the table. Raises the errors of
        `ensure_capacity` and changes nothing then.
        """
        n = integer("n", n, 0)
        wanted = self._missing(self.len + n) + len(self._shared(n))
        self.append_taken(n, iter(self.allocator.allocate_n(wanted).tolist()))
        return self.slots(n)

    def append_taken(self, n: int, taken: Iterator[int]) -> None:
        """Add `n` tokens, with the blocks that the caller has allocated for them."""
        for index in self._shared(n):
            old, new = self._blocks[index], next(taken)
            if index * self.block_size < self.len:
                self.allocator.copy_page(new, old)
            self._blocks[index] = self._table[index] = new
            self.allocator.free(old)
        self._extend(self._missing(self.len + n), taken)
        self.len += n

    def slots(self, n: int) -> np.ndarray:
        """Return the slots of the last `n` tokens, int64 `(n,)`."""
        return np.array([self.slot(token) for token in range(self.len - n, self.len)], dtype=np.int64)

    def truncate(self, len: int) -> None:
        """Keep the first `len` tokens and free every block after them, including reserved blocks.

        Raises `ValueError` if `len` is negative, above the present length, or within freed blocks.
        """
        self._use()
        tokens = integer("len", len, 0, self.len)
        if 0 < tokens < self.first_block * self.block_size:
            freed = self.first_block * self.block_size
            raise ValueError(f"cannot truncate to {tokens} tokens: the first {freed} were freed")
        self._keep(tokens)

    def drop_before(self, position: int) -> None:
        """Free the blocks that hold only tokens before `position`."""
        self._use()
        first = min(integer("position", position, 0), self.len) // self.block_size
        for place in range(self.first_block, first):
            self.allocator.free(self._blocks[place])
            self._blocks[place] = self._table[place] = -1
        self.first_block = max(self.first_block, first)

    def fork(self) -> PagedSeqState:
        """Return a sequence with the same tokens. It shares the blocks that hold tokens, but no reserved blocks."""
        self._use()
        child = PagedSeqState(self.allocator, self.block_size, self.max_blocks_per_seq, self.label)
        shared = self._blocks[: self._needed(self.len)]
        self.allocator.share(shared[self.first_block :])
        child._blocks = shared
        child.first_block = self.first_block
        child._table[: len(shared)] = shared
        child.len = self.len
        return child

    def adopt(self, blocks: Sequence[int], num_tokens: int | None = None) -> None:
        """Start an empty sequence with `num_tokens` tokens that `blocks` already hold. Shares these blocks.

        Raises `ValueError` if the sequence is not empty, the number of blocks does not match the tokens, or it exceeds
        `max_blocks_per_seq`.
        """
        self._use()
        ids = [int(block) for block in blocks]
        tokens = integer("num_tokens", len(ids) * self.block_size if num_tokens is None else num_tokens, 0)
        if self._blocks:
            raise ValueError(f"cannot adopt blocks: the sequence must be empty, but has {len(self._blocks)} blocks")
        if self._needed(tokens) != len(ids):
            raise ValueError(f"{tokens} tokens do not match {len(ids)} blocks of {self.block_size}")
        self._missing(tokens)
        self.allocator.share(ids)
        self._blocks = ids
        self._table[: len(ids)] = ids
        self.len = tokens

    def release(self) -> None:
        """Free all blocks. `len` becomes 0, and the sequence can be used again."""
        self._use()
        self._keep(0)

    def close(self) -> None:
        """Free all blocks. Later uses raise `StaleHandle`."""
        if not self.closed:
            self.release()
            self.closed = True

    def slot(self, token: int) -> int:
        """Return the slot of a token."""
        return self._blocks[token // self.block_size] * self.block_size + token % self.block_size

    def _use(self) -> None:
        if self.closed:
            raise StaleHandle(
                "the sequence was closed" if self.label is None else f"the sequence {self.label!r} was closed"
            )

    def _keep(self, tokens: int) -> None:
        kept = self._needed(tokens)
        self.allocator.free(self._blocks[max(kept, self.first_block) :])
        self._table[kept : len(self._blocks)] = 0
        del self._blocks[kept:]
        self.first_block = min(self.first_block, kept)
        self.len = tokens

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _missing(self, tokens: int) -> int:
        """Return the number of blocks to allocate for a length of `tokens`."""
        self._use()
        needed = self._needed(tokens)
        if needed > self.max_blocks_per_seq:
            raise ValueError(f"{tokens} tokens need {needed} blocks, a sequence has at most {self.max_blocks_per_seq}")
        return max(0, needed - len(self._blocks))

    def _shared(self, n: int) -> list[int]:
        """Return the places of the shared blocks that `append(n)` will write."""
        if not n:
            return []
        last = min(self._needed(self.len + n), len(self._blocks))
        places = range(self.len // self.block_size, last)
        return [place for place in places if self.allocator.ref_count(self._blocks[place]) > 1]

    def _extend(self, missing: int, taken: Iterator[int]) -> None:
        for _ in range(missing):
            self._table[len(self._blocks)] = block = next(taken)
            self._blocks.append(block)


class BlockTables:
    """Block tables and lengths for the kernels of a step, filled from the states of a batch.

    >>> from pagepool.reference import BlockAllocator
    >>> state = PagedSeqState(BlockAllocator(4), block_size=2)
    >>> slots = state.append(3)
    >>> tables = BlockTables(max_seqs=2, max_blocks_per_seq=4).fill([state], [2])
    >>> tables.block_tables.tolist(), tables.seq_lens.tolist(), tables.slot_mapping.tolist()
    ([[0, 1, 0, 0]], [3], [1, 2])
    """

    def __init__(self, max_seqs: int, max_blocks_per_seq: int) -> None:
        self.max_seqs = integer("max_seqs", max_seqs, 0)
        self.max_blocks_per_seq = integer("max_blocks_per_seq", max_blocks_per_seq, 0)
        self._set([], [])

    def fill(self, states: Any, num_tokens: Sequence[int] | None = None) -> BlockTables:
        """Fill the rows from `states` or from a `ScheduledBatch`. Returns this object.

        `slot_mapping` and `query_start_loc` cover the last `num_tokens[i]` tokens of each state. None means 1 token, 0
        for an empty state; a batch has its own numbers. Raises `ValueError`, and changes nothing, for more states than
        `max_seqs`, a state with more blocks than a row, states of different allocators, or a number above the length of
        a state.
        """
        if hasattr(states, "states"):
            states, num_tokens = states.states, states.num_tokens
        if num_tokens is None:
            num_tokens = [min(1, state.len) for state in states]
        for state in states:
            state._use()
        if len(states) > self.max_seqs:
            raise ValueError(f"states must have at most {self.max_seqs} sequences, not {len(states)}")
        for i, state in enumerate(states):
            if state.allocator is not states[0].allocator:
                raise ValueError(f"states: sequences 0 and {i} have different allocators")
        if len(num_tokens) != len(states):
            raise ValueError(f"{len(states)} states but {len(num_tokens)} numbers of tokens")
        for state, tokens in zip(states, num_tokens, strict=True):
            integer("num_tokens", tokens, 0, state.len)
            if state.len - tokens < state.first_block * state.block_size:
                raise ValueError(f"the first {state.first_block * state.block_size} tokens were freed")
            if state._needed(state.len) > self.max_blocks_per_seq:
                raise ValueError(f"{state.len} tokens do not fit into a row of {self.max_blocks_per_seq} blocks")
        self._set(states, num_tokens)
        return self

    def _set(self, states: Sequence[PagedSeqState], num_tokens: Sequence[int]) -> None:
        width = self.max_blocks_per_seq
        rows = [state._blocks[: state._needed(state.len)] for state in states]
        rows = [row + [0] * (width - len(row)) for row in rows]
        starts = list(accumulate(num_tokens, initial=0))
        slots = []
        for state, tokens in zip(states, num_tokens, strict=True):
            slots += [state.slot(token) for token in range(state.len - tokens, state.len)]
        self.allocator = states[0].allocator if states else None
        self.block_tables = np.array(rows, dtype=np.int32).reshape(len(rows), width)
        self.seq_lens = np.array([state.len for state in states], dtype=np.int32)
        self.slot_mapping = np.array(slots, dtype=np.int64)
        self.query_start_loc = np.array(starts, dtype=np.int32)
