"""Block tables in plain Python: the arrays that a step's kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pagepool.reference.allocator import count_of
from pagepool.reference.block_table import PagedSeqState

__all__ = ["BlockTables"]


class BlockTables:
    """The rows that a step's kernels read, filled from the states of a batch.

    >>> from pagepool.reference import BlockAllocator
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
        for state in states:
            state._use()
        if len(states) > self.max_seqs:
            raise ValueError(f"{len(states)} states, at most {self.max_seqs}")
        if len(num_tokens) != len(states):
            raise ValueError(f"{len(states)} states but {len(num_tokens)} numbers of tokens")
        for state, tokens in zip(states, num_tokens, strict=True):
            count_of("num_tokens", tokens, state.len)
            if state.len - tokens < state.first_block * state.block_size:
                raise ValueError(f"the first {state.first_block * state.block_size} tokens were given back")
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
        self.block_tables = np.array(rows, dtype=np.int32).reshape(len(rows), width)
        self.seq_lens = np.array([state.len for state in states], dtype=np.int32)
        self.slot_mapping = np.array(slots, dtype=np.int64)
        self.query_start_loc = np.array(starts, dtype=np.int32)
