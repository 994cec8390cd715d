"""BlockTables: the block tables of a batch as arrays that kernels read."""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy, memset

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport HAS_GIL, read_count, read_counts
from pagepool.memory.block_table cimport PagedSeqState

from collections.abc import Iterable

import numpy as np

from pagepool._arguments import integer, wrong
from pagepool.errors import refuse_copy
from pagepool.memory.explain import closed
from pagepool.memory.batch import append_batch, release_batch

__all__ = ["BlockTables", "append_batch", "release_batch"]

MOST_CELLS = 2**60  # the largest number of int32 that fits into the address space


@cython.final
cdef class BlockTables:
    """BlockTables(max_seqs, max_blocks_per_seq)\n--\n
    The arrays that describe a batch to kernels, allocated once for `max_seqs` rows of `max_blocks_per_seq` blocks.

    The arrays are copies, so writing into them does not change a sequence. They are writable because torch warns of
    read-only arrays. Not thread-safe. Raises `ValueError` when a size is below 0 or has more than 31 bits,
    `MemoryError`.

    >>> from pagepool import BlockAllocator, PagedSeqState
    >>> allocator = BlockAllocator(8)
    >>> states = [PagedSeqState(allocator, block_size=4), PagedSeqState(allocator, block_size=4)]
    >>> slots = states[0].append(6), states[1].append(1)
    >>> tables = BlockTables(max_seqs=2, max_blocks_per_seq=3).fill(states)
    >>> tables.block_tables.tolist(), tables.seq_lens.tolist(), tables.slot_mapping.tolist()
    ([[0, 1, 0], [2, 0, 0]], [6, 1], [5, 8])
    """

    def __cinit__(self, max_seqs, max_blocks_per_seq):
        rows = integer("max_seqs", max_seqs, 0, INT32_MAX - 1)
        width = integer("max_blocks_per_seq", max_blocks_per_seq, 0, INT32_MAX - 1)
        if rows * width > MOST_CELLS:
            raise MemoryError(f"no memory for {rows} rows of {width} blocks")
        self.max_seqs = rows
        self.max_blocks_per_seq = width
        self._tables = self.tables = np.zeros((rows, width), np.int32)
        self._lens = self.lens = np.zeros(rows, np.int32)
        self._query_starts = self.query_starts = np.zeros(rows + 1, np.int32)
        self._slots = self.slots = np.zeros(rows, np.int64)
        self.filled = np.zeros(rows, np.int32)
        self.counts = np.zeros(rows, np.int32)

    def fill(self, states, num_tokens=None):
        """Describes a batch: a list of `PagedSeqState` in row order, or a `ScheduledBatch`; returns itself.

        `num_tokens[i]` is how many of state i's last tokens this step computes: by default 1 each (0 for an empty
        state), for a batch `batch.num_tokens`. The next `fill` overwrites the arrays. Raises `ValueError` when there
        are more states than rows, a state has more blocks than a row, two states have different allocators, or
        `num_tokens` does not fit the states; then nothing has changed. Allocates only when a batch has more tokens than
        every batch before.
        """
        cdef list rows
        cdef PagedSeqState state
        cdef BlockAllocator allocator = None
        cdef Py_ssize_t i, n
        cdef int64_t tokens, total = 0
        if hasattr(states, "states"):
            if num_tokens is not None:
                raise ValueError("num_tokens must be None for a batch, which has its own")
            states, num_tokens = states.states, states.num_tokens
        if num_tokens is not None:
            if not isinstance(num_tokens, Iterable):
                raise wrong("num_tokens", "a sequence of integers or None", num_tokens)
            num_tokens = read_counts(num_tokens)
        if not isinstance(states, Iterable):
            raise wrong("states", "a ScheduledBatch or a sequence of PagedSeqState", states)
        rows = states if HAS_GIL and type(states) is list else list(states)
        n = len(rows)
        if n > self.max_seqs:
            raise ValueError(f"cannot fill {n} sequences into {self.max_seqs} rows")
        if num_tokens is not None and len(num_tokens) != n:
            raise ValueError(f"num_tokens has {len(num_tokens)} entries for {n} sequences")
        for i in range(n):
            item = rows[i]
            if not isinstance(item, PagedSeqState):
                raise TypeError(f"sequence {i} must be a PagedSeqState, not {type(item).__name__}")
            state = <PagedSeqState>item
            if state.is_closed:
                raise closed(f"sequence {i}", state.label)
            if allocator is None:
                allocator = state.allocator
            elif allocator is not state.allocator:
                raise ValueError(f"states: sequences 0 and {i} have different allocators")
            if state.length > self.max_blocks_per_seq * <int64_t>state.block_size:
                raise ValueError(
                    f"sequence {i} has {(state.length + state.block_size - 1) // state.block_size} blocks of tokens, "
                    f"a row has room for {self.max_blocks_per_seq}"
                )
            if state.length > INT32_MAX:
                raise ValueError(f"sequence {i} has {state.length} tokens, seq_lens can hold {INT32_MAX}")
            tokens = state.length > 0 if num_tokens is None else read_count(num_tokens[i])
            if not 0 <= tokens <= state.length:
                raise ValueError(f"sequence {i} has {state.length} tokens, its last {num_tokens[i]} cannot be computed")
            if state.length - tokens < state.first_block * <int64_t>state.block_size:
                raise ValueError(
                    f"the last {tokens} of {state.length} tokens of sequence {i} cannot be computed: "
                    f"the first {state.first_block * <int64_t>state.block_size} were given back"
                )
            self.counts[i] = <int32_t>tokens
            total += tokens
        if total > INT32_MAX:
            raise ValueError(f"a batch of {total} tokens is past the {INT32_MAX} that query_start_loc can count")
        self.reserve_slots(total)
        self.query_starts[0] = 0  # a caller may have written another number
        for i in range(n):
            self.c_fill_row(i, <PagedSeqState>rows[i], self.counts[i])
        self.num_seqs = n
        self.allocator = allocator
        return self

    cdef int reserve_slots(self, int64_t count) except -1:
        if count > self.slots.shape[0]:
            grown = np.zeros(max(count, 2 * self.slots.shape[0]), np.int64)
            self.slots = grown
            self._slots = grown
        return 0

    cdef void c_fill_row(self, Py_ssize_t row, PagedSeqState state, int64_t num_tokens) noexcept nogil:
        cdef int32_t *cells = &self.tables[row, 0]
        cdef int32_t start = self.query_starts[row]
        cdef int32_t blocks = <int32_t>((state.length + state.block_size - 1) // state.block_size)
        memcpy(cells, state.c_blocks, <size_t>blocks * sizeof(int32_t))
        if blocks < self.filled[row]:
            memset(cells + blocks, 0, <size_t>(self.filled[row] - blocks) * sizeof(int32_t))
        self.filled[row] = blocks
        self.lens[row] = <int32_t>state.length
        self.query_starts[row + 1] = start + <int32_t>num_tokens
        state.c_slots(state.length - num_tokens, num_tokens, &self.slots[start])

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        return f"<{type(self).__name__}: {self.num_seqs} of {self.max_seqs} rows filled>"

    @property
    def block_tables(self):
        """int32 (n, max_blocks_per_seq): the blocks that hold tokens, then zeros."""
        return self._tables[:self.num_seqs]

    @property
    def seq_lens(self):
        """int32 (n,): tokens of each sequence, including the tokens of this step."""
        return self._lens[:self.num_seqs]

    @property
    def slot_mapping(self):
        """int64 (tokens of the step,): where each token's K and V go, sequence after sequence."""
        return self._slots[:self.query_starts[self.num_seqs]]

    @property
    def query_start_loc(self):
        """int32 (n + 1,): the tokens of sequence i are number query_start_loc[i] to query_start_loc[i + 1] - 1."""
        return self._query_starts[:self.num_seqs + 1]
