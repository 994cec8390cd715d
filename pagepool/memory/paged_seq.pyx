"""PagedSeqState: which blocks hold the tokens of one sequence."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

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

import operator

import numpy as np

from pagepool.errors import InvalidBlock, PoolError
from pagepool.memory.explain import exhausted

__all__ = ["PagedSeqState"]

cdef int64_t FEW_BLOCKS = 64  # as many are taken by way of the stack
cdef int64_t MAX_TOKENS = <int64_t>1 << 60  # keeps sums of lengths within 64 bits
cdef int64_t BELOW_ZERO = -1, OVER_MAXIMUM = -2
cdef object empty = np.empty
cdef object INT64 = np.dtype(np.int64)


@cython.final
@cython.no_gc
cdef class PagedSeqState:
    """The block table of one sequence.

    allocator            the `BlockAllocator` that its blocks come from, for good
    block_size           tokens per block, from 1 to 1,024
    max_blocks_per_seq   the most blocks it may have; by default as many as the allocator may have

    A block that several sequences share is copied, with its page in every attached pool, when one of them appends into
    it. One state belongs to one thread at a time; different ones, forks included, may run in parallel. A state that is
    no longer referenced gives its blocks back. Raises `ValueError` for sizes out of range.

    >>> from pagepool import BlockAllocator
    >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
    >>> state.append(6).tolist(), state.blocks, state.len
    ([0, 1, 2, 3, 4, 5], [0, 1], 6)
    >>> child = state.fork()
    >>> child.append().tolist(), child.blocks, state.blocks
    ([10], [0, 2], [0, 1])
    """

    def __cinit__(self, BlockAllocator allocator not None, block_size=16, max_blocks_per_seq=None):
        size = operator.index(block_size)
        if not 1 <= size <= 1024:
            raise ValueError(f"block_size must be from 1 to 1024, not {size}")
        maximum = allocator.max_capacity if max_blocks_per_seq is None else operator.index(max_blocks_per_seq)
        if not 0 <= maximum <= INT32_MAX:
            raise ValueError(f"max_blocks_per_seq must be from 0 to {INT32_MAX}, not {maximum}")
        self.memory = PageBuffer(maximum, "i")
        self.allocator = allocator
        self.block_size = size
        self.max_blocks_per_seq = maximum
        self.table = self.memory
        self.c_blocks = <int32_t *>self.memory.base

    def __dealloc__(self):
        if self.num_blocks and self.c_release() != PP_OK:
            raise InvalidBlock(f"one of the {self.num_blocks} blocks of a sequence that goes was freed by someone else")

    cdef pp_status c_ensure_capacity(self, int64_t target_len) noexcept nogil:
        cdef pp_status status
        cdef int64_t needed
        if target_len < 0:
            return PP_INVALID_ARGUMENT
        needed = target_len // self.block_size + (target_len % self.block_size != 0)
        if needed > self.max_blocks_per_seq:
            return PP_OVER_MAXIMUM
        if needed <= self.num_blocks:
            return PP_OK
        status = self.allocator.c_allocate_n(<int32_t>needed - self.num_blocks, self.c_blocks + self.num_blocks)
        if status == PP_OK:
            self.num_blocks = <int32_t>needed
        return status

    cdef int64_t c_blocks_to_append(self, int64_t n) noexcept nogil:
        cdef int64_t target, needed, wanted, i
        if n < 0:
            return BELOW_ZERO
        if n > MAX_TOKENS:
            return OVER_MAXIMUM
        target = self.length + n
        needed = target // self.block_size + (target % self.block_size != 0)
        if needed > self.max_blocks_per_seq:
            return OVER_MAXIMUM
        wanted = max(needed - self.num_blocks, 0)
        if n:
            for i in range(self.length // self.block_size, min(needed, self.num_blocks)):
                wanted += self.allocator.c_is_shared(self.c_blocks[i])
        return wanted

    cdef pp_status c_append(self, int64_t n, int64_t *slots_out) noexcept nogil:
        cdef int32_t few[64]
        cdef int32_t *taken = few
        cdef pp_status status
        cdef int64_t first = self.length, used
        cdef int64_t wanted = self.c_blocks_to_append(n)
        if wanted < 0:
            return PP_INVALID_ARGUMENT if wanted == BELOW_ZERO else PP_OVER_MAXIMUM
        if wanted:
            if wanted > FEW_BLOCKS:
                taken = <int32_t *>malloc(<size_t>wanted * sizeof(int32_t))
                if taken == NULL:
                    return PP_NO_MEMORY
            status = self.allocator.c_allocate_n(<int32_t>wanted, taken)
            if status == PP_OK:
                used = self.c_append_taken(n, taken)
                self.allocator.c_free_n(taken + used, wanted - used)
            if taken != few:
                free(taken)
            if status != PP_OK:
                return status
        else:
            self.length += n
        if slots_out != NULL:
            self.c_slots(first, n, slots_out)
        return PP_OK

    cdef int64_t c_append_taken(self, int64_t n, const int32_t *taken) noexcept nogil:
        cdef int64_t tail = self.length // self.block_size, target = self.length + n
        cdef int64_t needed = target // self.block_size + (target % self.block_size != 0)
        cdef int64_t i, used = 0
        cdef int32_t old
        if n:
            for i in range(tail, min(needed, self.num_blocks)):
                old = self.c_blocks[i]
                if not self.allocator.c_is_shared(old):
                    continue
                if i == tail and self.length % self.block_size:
                    self.allocator.c_copy_page(taken[used], old)
                self.c_blocks[i] = taken[used]
                used += 1
                self.allocator.c_free(old)
        while self.num_blocks < needed:
            self.c_blocks[self.num_blocks] = taken[used]
            self.num_blocks += 1
            used += 1
        self.length = target
        return used

    cdef void c_slots(self, int64_t first, int64_t n, int64_t *slots_out) noexcept nogil:
        """The slots of tokens first to first + n - 1, all of them below the length."""
        cdef int64_t block = first // self.block_size, offset = first % self.block_size, i
        for i in range(n):
            slots_out[i] = <int64_t>self.c_blocks[block] * self.block_size + offset
            offset += 1
            if offset == self.block_size:
                offset = 0
                block += 1

    cdef pp_status c_truncate(self, int64_t new_len) noexcept nogil:
        cdef pp_status status
        cdef int32_t keep
        if not 0 <= new_len <= self.length:
            return PP_INVALID_ARGUMENT
        keep = <int32_t>((new_len + self.block_size - 1) // self.block_size)
        status = self.allocator.c_free_n(self.c_blocks + keep, self.num_blocks - keep)
        if status == PP_OK:
            self.c_forget(keep)
            self.length = new_len
        return status

    cdef pp_status c_release(self) noexcept nogil:
        return self.c_truncate(0)

    cdef pp_status c_adopt(self, const int32_t *blocks, Py_ssize_t n, int64_t num_tokens) noexcept nogil:
        cdef pp_status status
        if self.num_blocks or num_tokens < 0 or num_tokens > MAX_TOKENS:
            return PP_INVALID_ARGUMENT
        if n != num_tokens // self.block_size + (num_tokens % self.block_size != 0):
            return PP_INVALID_ARGUMENT
        if n > self.max_blocks_per_seq:
            return PP_OVER_MAXIMUM
        status = self.allocator.c_share_n(blocks, n)
        if status == PP_OVER_MAXIMUM:
            return PP_INVALID_BLOCK
        if status == PP_OK:
            memcpy(self.c_blocks, blocks, <size_t>n * sizeof(int32_t))
            self.num_blocks = <int32_t>n
            self.length = num_tokens
        return status

    cdef void c_forget(self, int32_t keep) noexcept nogil:
        memset(self.c_blocks + keep, 0, <size_t>(self.num_blocks - keep) * sizeof(int32_t))
        self.num_blocks = keep

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

        Raises `ValueError` when `len` is below 0 or above the present length, `InvalidBlock` when one of the blocks was
        freed by someone else; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
        >>> slots = state.append(9)
        >>> state.truncate(5)
        >>> state.blocks, state.len
        ([0, 1], 5)
        """
        cdef int64_t number = read_count(len)
        cdef pp_status status = self.c_truncate(number)
        if status == PP_INVALID_ARGUMENT:
            raise ValueError(f"cannot truncate {self.length} tokens to {number}")
        if status != PP_OK:
            raise self.failed(status, number, 0)

    def fork(self):
        """A new state with the same tokens that shares the blocks which hold them; reserved blocks stay with this one.

        Raises `PoolError` when a block has as many references as a count can hold, `InvalidBlock` when one was freed by
        someone else, `MemoryError`; then nothing has changed.
        """
        cdef PagedSeqState child = PagedSeqState(self.allocator, self.block_size, self.max_blocks_per_seq)
        cdef int32_t held = <int32_t>needed_blocks(self.length, self.block_size)
        cdef pp_status status = self.allocator.c_share_n(self.c_blocks, held)
        if status == PP_OVER_MAXIMUM:
            raise PoolError(f"cannot fork: a count of references would pass its maximum of {INT32_MAX}")
        if status != PP_OK:
            raise self.failed(status, self.length, 0)
        memcpy(child.c_blocks, self.c_blocks, <size_t>held * sizeof(int32_t))
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
                if self.num_blocks:
                    raise ValueError(f"cannot adopt blocks: the sequence has {self.num_blocks} of its own")
                raise ValueError(f"{number} tokens are not what {ids.count} blocks of {self.block_size} hold")
        finally:
            release_ids(&ids)

    def release(self):
        """Gives every block back; `len` becomes 0 and the state can be used again.

        Raises `InvalidBlock` when a block was freed by someone else; then nothing has changed.
        """
        cdef pp_status status = self.c_release()
        if status != PP_OK:
            raise self.failed(status, 0, 0)

    @property
    def blocks(self):
        """The ids of its blocks, reserved ones too, as a new list."""
        return list_ids(self.c_blocks, self.num_blocks)

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
        """The table itself, a live int32 memoryview of `max_blocks_per_seq` ids; zeros follow the blocks.

        It stays valid when the state is gone, but shows zeros from then on.
        """
        return memoryview(self.memory)

    cdef object failed(self, pp_status status, object number, object wanted):
        """The exception for a status: `number` tokens were asked for (in all, or more), and `wanted` blocks."""
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
