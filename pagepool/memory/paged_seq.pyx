"""PagedSeqState: which blocks hold the tokens of one sequence."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.csrc cimport (
    PP_EXHAUSTED,
    PP_INVALID_ARGUMENT,
    PP_INVALID_BLOCK,
    PP_NO_MEMORY,
    PP_OK,
    PP_OVER_MAXIMUM,
    pp_status,
)
from pagepool.memory.ids cimport IdArray, list_ids, read_count, read_ids, release_ids
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.memory.paged_table cimport PagedTable

import numpy as np

from pagepool.errors import InvalidBlock, PoolError, StaleHandle, refuse_copy
from pagepool.arguments import integer
from pagepool.memory.explain import closed, exhausted

__all__ = ["PagedSeqState", "SequenceHandle"]

cdef object empty = np.empty
cdef object INT64 = np.dtype(np.int64)


@cython.auto_pickle(False)
@cython.final
@cython.no_gc
cdef class PagedSeqState(PagedTable):
    """The block table of one sequence.

    allocator            the `BlockAllocator` that its blocks come from, for good
    block_size           tokens per block, from 1 to 1,024; by default those of the pool that has these blocks, else 16
    max_blocks_per_seq   the most blocks it may have; by default as many as the allocator may have
    label                whose it is, for `BlockAllocator.owners` and `.leaks`: a request id, a name or None

    A block that several sequences share is copied, with its page in every attached pool, when one of them appends into
    it. One state belongs to one thread at a time; different ones, forks included, may run in parallel. A state that is
    no longer referenced gives its blocks back. `generation` counts the releases: see `handle`. Raises `ValueError` for
    sizes out of range, `TypeError` for another label.

    >>> from pagepool import BlockAllocator
    >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
    >>> state.append(6).tolist(), state.blocks, state.len
    ([0, 1, 2, 3, 4, 5], [0, 1], 6)
    >>> child = state.fork()
    >>> child.append().tolist(), child.blocks, state.blocks
    ([10], [0, 2], [0, 1])
    """

    def __cinit__(self, BlockAllocator allocator not None, block_size=None, max_blocks_per_seq=None, label=None):
        cdef int32_t size = allocator.read_block_size(block_size)
        maximum = allocator.max_capacity
        if max_blocks_per_seq is not None:
            maximum = integer("max_blocks_per_seq", max_blocks_per_seq, 0, INT32_MAX)
        self.memory = PageBuffer(maximum, "i")
        self.allocator = allocator
        self.block_size = size
        self.max_blocks_per_seq = maximum
        self.c_blocks = <int32_t *>self.memory.base
        if label is not None:
            self.label = label
        self.c_enlist(&allocator.head)

    def ensure_capacity(self, target_len):
        """Reserves blocks for `target_len` tokens in all; `len` does not change.

        Does nothing when they are there. Raises `ValueError` past the maximum of blocks or below 0, `PoolExhausted` if
        the allocator has too few; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
        >>> state.ensure_capacity(9)
        >>> state.blocks, state.len
        ([0, 1, 2], 0)
        """
        cdef int64_t target = read_count(target_len)
        cdef pp_status status = self.c_ensure_capacity(target)
        if status != PP_OK:
            raise self.failed(status, target, needed_blocks(target, self.block_size) - self.num_blocks)

    def append(self, n=1):
        """Makes room for n more tokens and counts them; returns their slots, an int64 array (n,).

        Takes new blocks as needed, and one for each shared block that the tokens will be written to: its page is copied
        in every attached pool. The K and V are then written by `KvCachePool.append`. Raises `ValueError` past the
        maximum of blocks or below 0, `PoolExhausted` when the allocator has too few; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> PagedSeqState(BlockAllocator(8), block_size=4).append(2)
        array([0, 1])
        """
        cdef int64_t number = read_count(n)
        cdef Py_buffer view
        cdef pp_status status = PP_INVALID_ARGUMENT
        if number >= 0 and self.c_blocks_to_append(number) < 0:
            raise self.failed(PP_OVER_MAXIMUM, self.length + number, 0)
        if number >= 0:
            slots = empty(number, INT64)
            PyObject_GetBuffer(slots, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
            status = self.c_append(number, <int64_t *>view.buf)
            PyBuffer_Release(&view)
        if status != PP_OK:
            raise self.failed(status, number, self.c_blocks_to_append(number))
        return slots

    def truncate(self, len):
        """Keeps the first `len` tokens and gives back every block behind them, reserved ones too.

        Raises `ValueError` when `len` is below 0, above the present length or within blocks that `drop_before` gave
        back, `InvalidBlock` when one of the blocks was freed by someone else; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
        >>> slots = state.append(9)
        >>> state.truncate(5)
        >>> state.blocks, state.len
        ([0, 1], 5)
        """
        cdef int64_t number = read_count(len)
        cdef pp_status status = self.c_truncate(number)
        if status == PP_INVALID_ARGUMENT and not self.is_closed:
            start = self.first_block * <int64_t>self.block_size
            if 0 < number < start:
                raise ValueError(f"cannot truncate to {number} tokens: the first {start} were given back")
            raise ValueError(f"cannot truncate {self.length} tokens to {number}")
        if status != PP_OK:
            raise self.failed(status, number, 0)

    def drop_before(self, position):
        """Gives back the blocks whose tokens all lie before `position`: what a sliding window has left behind.

        `len` and the places of the other blocks stay; in the table, -1 takes the place of those given back, which
        attention with `window_left` does not read. Raises `ValueError` when `position` is below 0, `InvalidBlock` when
        a block was freed by someone else; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
        >>> slots = state.append(11)
        >>> state.drop_before(6)
        >>> state.blocks, state.first_block, state.len
        ([1, 2], 1, 11)
        """
        cdef int64_t number = read_count(position)
        cdef pp_status status = self.c_drop_before(number)
        if status != PP_OK:
            raise self.failed(status, number, 0)

    def fork(self):
        """A new state with the same tokens that shares the blocks which hold them; reserved blocks stay with this one.

        Its label is the same.

        Raises `PoolError` when a block has as many references as a count can hold, `InvalidBlock` when one was freed by
        someone else, `MemoryError`; then nothing has changed.
        """
        cdef PagedSeqState child
        cdef int32_t first = self.first_block, held = <int32_t>needed_blocks(self.length, self.block_size)
        if self.is_closed:
            raise self.failed(PP_INVALID_ARGUMENT, 0, 0)
        child = PagedSeqState(self.allocator, self.block_size, self.max_blocks_per_seq)
        cdef pp_status status = self.allocator.c_share_n(self.c_blocks + first, held - first)
        if status == PP_OVER_MAXIMUM:
            raise PoolError(f"cannot fork: a count of references would pass its maximum of {INT32_MAX}")
        if status != PP_OK:
            raise self.failed(status, self.length, 0)
        memcpy(child.c_blocks, self.c_blocks, <size_t>held * sizeof(int32_t))
        child._label = self._label
        child.first_block = first
        child.num_blocks = held
        child.length = self.length
        return child

    def adopt(self, blocks, num_tokens=None):
        """Begins with tokens that are in blocks already, as those of `PrefixCache.match_prefix`: `len` is their number.

        blocks      ids of the blocks that hold them, in order: a sequence of integers or an array
        num_tokens  how many there are; by default all blocks are full. The last block may be filled in part

        Adds one reference to each block, so that the caller's own are still the caller's to free. Nothing is copied:
        an `append` into a last block that others hold, too, takes a new one and copies its page first. Raises
        `ValueError` when the state is not empty, passes its maximum of blocks, or has another number of blocks than
        the tokens need, `InvalidBlock` for one that is free or out of range; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> allocator = BlockAllocator(8)
        >>> state = PagedSeqState(allocator, block_size=4)
        >>> state.adopt(allocator.allocate_n(2), 7)
        >>> state.append().tolist(), state.blocks
        ([11], [0, 2])
        """
        cdef IdArray ids
        cdef pp_status status
        cdef int64_t number
        read_ids(blocks, &ids)
        try:
            number = ids.count * <int64_t>self.block_size if num_tokens is None else read_count(num_tokens)
            status = self.c_adopt(ids.ids, ids.count, number)
            if status == PP_OVER_MAXIMUM:
                raise self.failed(status, number, 0)
            if status == PP_INVALID_BLOCK:
                raise self.allocator.invalid(&ids, "add")
            if status != PP_OK:
                if self.is_closed:
                    raise self.failed(status, number, 0)
                if self.num_blocks:
                    raise ValueError(f"cannot adopt blocks: the sequence has {self.num_blocks} of its own")
                raise ValueError(f"{number} tokens are not what {ids.count} blocks of {self.block_size} hold")
        finally:
            release_ids(&ids)

    def release(self):
        """Gives every block back; `len` becomes 0 and the state can be used again, under a new `generation`.

        Raises `InvalidBlock` when a block was freed by someone else; then nothing has changed.
        """
        cdef pp_status status = self.c_release()
        if status != PP_OK:
            raise self.failed(status, 0, 0)

    def close(self):
        """Releases the state for good: whoever uses it later gets `StaleHandle`. Closing twice does nothing.

        Raises as `release` does.
        """
        cdef pp_status status = PP_OK if self.is_closed else self.c_close()
        if status != PP_OK:
            raise self.failed(status, 0, 0)

    def begin(self):
        """Begins a transaction: until its `commit` or `abort`, nothing that `abort` needs is freed or overwritten.

        Whatever is done to the state meanwhile, by whichever function, counts as part of it. It costs a copy of the
        ids; blocks that leave the table are freed by `commit`. Transactions nest, the inner one ends first. See
        `Transaction`, which spans several objects. Raises `MemoryError`; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
        >>> slots = state.append(5)
        >>> state.begin()
        >>> state.truncate(2)
        >>> slots = state.append(9)
        >>> state.abort()
        >>> state.blocks, state.len, state.allocator.in_use
        ([0, 1], 5, 2)
        """
        cdef pp_status status = self.c_begin()
        if status != PP_OK:
            raise self.failed(status, 0, self.num_blocks)

    def commit(self):
        """Ends the innermost transaction, all that was done stays. Cannot fail; `ValueError` when none is open."""
        if self.c_commit() != PP_OK:
            raise ValueError("the sequence is in no transaction")

    def abort(self):
        """Ends the innermost transaction and puts everything back as it was; cannot fail. `ValueError` as `commit`."""
        if self.c_abort() != PP_OK:
            raise ValueError("the sequence is in no transaction")

    def handle(self):
        """A `SequenceHandle` to the state as it is lent now: stale once the state was released.

        Raises `StaleHandle` when the state is closed.
        """
        if self.is_closed:
            raise self.failed(PP_INVALID_ARGUMENT, 0, 0)
        return SequenceHandle(self)

    @property
    def blocks(self):
        """The ids of its blocks, reserved ones too, from `first_block` on, as a new list."""
        return list_ids(self.c_blocks + self.first_block, self.num_blocks - self.first_block)

    @property
    def closed(self):
        """Whether it was closed."""
        return self.is_closed

    @property
    def len(self):
        """Tokens that were appended."""
        return self.length

    @property
    def context_len(self):
        """The same as `len`."""
        return self.length

    @property
    def block_table(self):
        """The table itself, a live int32 memoryview of `max_blocks_per_seq` ids, read-only; zeros follow the blocks.

        It stays valid when the state is gone, but shows zeros from then on.
        """
        return memoryview(self.memory).toreadonly()

    cdef object failed(self, pp_status status, object number, object wanted):
        """The exception for a status: `number` tokens were asked for (in all, or more), and `wanted` blocks."""
        if self.is_closed:
            return closed("the sequence", self._label)
        if status == PP_OVER_MAXIMUM:
            needed = needed_blocks(number, self.block_size)
            return ValueError(f"{number} tokens need {needed} blocks, the maximum is {self.max_blocks_per_seq}")
        if status == PP_EXHAUSTED:
            return exhausted(wanted, self.allocator.c_available(), self.allocator.max_capacity)
        if status == PP_INVALID_BLOCK:
            return InvalidBlock(f"one of the {self.num_blocks} blocks of the sequence was freed by someone else")
        if status == PP_NO_MEMORY:
            return MemoryError(f"no memory to take {wanted} blocks")
        return ValueError(f"a number of tokens cannot be {number}")


cdef object needed_blocks(object length, object block_size):
    return -(-length // block_size)


@cython.final
@cython.no_gc
cdef class SequenceHandle:
    """A `PagedSeqState` as it was lent: `state` is that state until it is released, and raises `StaleHandle` after.

    For whoever keeps a sequence that another may end: an engine's queue, a thread, a batch under way.

    >>> from pagepool import BlockAllocator
    >>> state = PagedSeqState(BlockAllocator(8), block_size=4, label="request 7")
    >>> handle = state.handle()
    >>> handle.state is state
    True
    >>> state.release()
    >>> handle.state
    Traceback (most recent call last):
    pagepool.errors.StaleHandle: the handle is of generation 0, the sequence 'request 7' is in generation 1
    """

    def __cinit__(self, PagedSeqState state not None):
        self.lent = state
        self.generation = state.generation

    def __reduce__(self):
        refuse_copy(self)

    @property
    def state(self):
        """The state. Raises `StaleHandle` once it was released, whoever uses it by now."""
        if self.lent.generation != self.generation or self.lent.is_closed:
            now = "closed" if self.lent.is_closed else f"in generation {self.lent.generation}"
            who = "the sequence" if self.lent._label is None else f"the sequence {self.lent._label!r}"
            raise StaleHandle(f"the handle is of generation {self.generation}, {who} is {now}")
        return self.lent

    @property
    def is_stale(self):
        """Whether `state` would raise."""
        return self.lent.generation != self.generation or self.lent.is_closed
