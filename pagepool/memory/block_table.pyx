"""PagedSeqState: the block table of one sequence. The methods that change it have `c_` forms that need no GIL."""

cimport cython
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
from pagepool.memory.arrays cimport IdArray, list_ids, new_int64, read_count, read_ids, release_ids
from pagepool.memory.block_refs cimport PrefixMatch
from pagepool.memory.page_buffer cimport PageBuffer

from pagepool.errors import InvalidBlock, PoolError, refuse_copy
from pagepool._arguments import integer
from pagepool.memory.explain import closed

__all__ = ["PagedSeqState"]

cdef int64_t FEW_BLOCKS = 64  # this many ids are passed on the stack
cdef int64_t MAX_TOKENS = <int64_t>1 << 60  # limits lengths so that their sums fit into 64 bits
cdef int64_t INVALID = -1, OVER_MAXIMUM = -2


@cython.auto_pickle(False)
@cython.final
@cython.no_gc
cdef class PagedSeqState:
    """PagedSeqState(allocator, block_size=None, max_blocks_per_seq=None, label=None)\n--\n
    The block table of one sequence.

    When a sequence appends into a block that others share, it gets a new block, and the page is copied in every
    attached pool. A state is not thread-safe; different states, forks included, may be used in parallel. A state
    frees its blocks when it is garbage collected. Raises `ValueError` for sizes out of range,
    `TypeError` for another label.

    Parameters
    ----------
    allocator
        The `BlockAllocator` of its blocks.
    block_size
        Tokens per block, from 1 to 1,024; by default the block size of the allocator's pool, else 16.
    max_blocks_per_seq
        The maximum number of blocks; by default the maximum of the allocator.
    label
        A request id, a name or None, for `BlockAllocator.owners` and `BlockAllocator.leaks`.

    Examples
    --------
    >>> from pagepool import BlockAllocator
    >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
    >>> state.append(6).tolist(), state.blocks, state.len
    ([0, 1, 2, 3, 4, 5], [0, 1], 6)
    >>> child = state.fork()
    >>> child.append().tolist(), child.blocks, state.blocks
    ([10], [0, 2], [0, 1])
    """

    kind = "sequence"

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
        allocator.c_enlist(&self.link, self)

    # Not __dealloc__: while it runs, weak references still return the object.
    def __del__(self):
        if self.link.next != NULL:
            self.allocator.c_delist(&self.link)
        if self.num_blocks and self.c_release() != PP_OK:
            raise InvalidBlock(f"one of the {self.num_blocks} blocks of a dropped sequence was freed by someone else")

    cdef pp_status c_ensure_capacity(self, int64_t target_len) noexcept nogil:
        cdef pp_status status
        cdef int64_t needed
        if target_len < 0 or self.is_closed:
            return PP_INVALID_ARGUMENT
        needed = self.c_needed(target_len)
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
        if n < 0 or self.is_closed:
            return INVALID
        if n > MAX_TOKENS:
            return OVER_MAXIMUM
        target = self.length + n
        needed = self.c_needed(target)
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
            return PP_INVALID_ARGUMENT if wanted == INVALID else PP_OVER_MAXIMUM
        if wanted:
            if wanted > FEW_BLOCKS:
                if wanted > self.allocator.c_available():
                    return PP_EXHAUSTED
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
        cdef int64_t needed = self.c_needed(target), i, used = 0
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
        """The slots of tokens first to first + n - 1, all of them below the length and in blocks that it has."""
        cdef int64_t block = first // self.block_size, offset = first % self.block_size, i
        for i in range(n):
            slots_out[i] = <int64_t>self.c_blocks[block] * self.block_size + offset
            offset += 1
            if offset == self.block_size:
                offset = 0
                block += 1

    cdef bint c_can_keep(self, int64_t new_len) noexcept nogil:
        if self.is_closed or not 0 <= new_len <= self.length:
            return False
        return new_len == 0 or new_len >= <int64_t>self.first_block * self.block_size

    cdef pp_status c_may_truncate(self, int64_t new_len) noexcept nogil:
        cdef int32_t i
        if not self.c_can_keep(new_len):
            return PP_INVALID_ARGUMENT
        for i in range(max(<int32_t>self.c_needed(new_len), self.first_block), self.num_blocks):
            if self.allocator.c_ref_count(self.c_blocks[i]) < 1:
                return PP_INVALID_BLOCK
        return PP_OK

    cdef pp_status c_truncate(self, int64_t new_len) noexcept nogil:
        cdef pp_status status
        cdef int32_t keep, first
        if not self.c_can_keep(new_len):
            return PP_INVALID_ARGUMENT
        keep = <int32_t>self.c_needed(new_len)
        first = max(keep, self.first_block)
        status = self.allocator.c_free_n(self.c_blocks + first, self.num_blocks - first)
        if status == PP_OK:
            self.c_forget(keep)
            self.length = new_len
        return status

    cdef pp_status c_drop_before(self, int64_t position) noexcept nogil:
        cdef pp_status status = PP_OK
        cdef int32_t first, i
        if position < 0 or self.is_closed:
            return PP_INVALID_ARGUMENT
        first = <int32_t>(min(position, self.length) // self.block_size)
        if first > self.first_block:
            status = self.allocator.c_free_n(self.c_blocks + self.first_block, first - self.first_block)
            if status == PP_OK:
                for i in range(self.first_block, first):
                    self.c_blocks[i] = -1
                self.first_block = first
        return status

    cdef pp_status c_release(self) noexcept nogil:
        return self.c_truncate(0)

    cdef pp_status c_close(self) noexcept nogil:
        cdef pp_status status = self.c_release()
        if status == PP_OK:
            self.is_closed = True
        return status

    cdef pp_status c_adopt(self, const int32_t *blocks, Py_ssize_t n, int64_t num_tokens) noexcept nogil:
        cdef pp_status status
        if self.num_blocks or self.is_closed or num_tokens < 0 or num_tokens > MAX_TOKENS:
            return PP_INVALID_ARGUMENT
        if n != self.c_needed(num_tokens):
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
        self.first_block = min(self.first_block, keep)

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        label = self.label
        name = type(self).__name__ if label is None else f"{type(self).__name__} {label!r}"
        if self.is_closed:
            return f"<{name}: closed>"
        held = self.num_blocks - self.first_block
        return f"<{name}: {self.length} tokens, {held} blocks of {self.block_size}>"

    @property
    def label(self):
        """The label of this sequence in `owners` and `leaks`: a request id, a text or None. May be set at any time.

        A value of a subclass of int or str is stored as a plain int or str.
        """
        with cython.critical_section(self):
            return self._label

    @label.setter
    def label(self, value):
        if value is not None and not isinstance(value, (int, str)):
            raise TypeError(f"a label must be an int, a str or None, not {type(value).__name__}")
        if isinstance(value, str):  # no subclass: its attributes could form a reference cycle
            value = str.__str__(value)
        elif value is not None:
            value = int.__int__(value)
        with cython.critical_section(self):
            self._label = value

    def references(self):
        """The ids of its blocks, one entry for each reference."""
        cdef int32_t first = self.first_block, end = self.num_blocks  # read once: the allocator asks on any thread
        return list_ids(self.c_blocks + first, end - first)

    def ensure_capacity(self, target_len):
        """Reserves blocks for `target_len` tokens in all; `len` does not change.

        Does nothing if the sequence has them. Raises `ValueError` past the maximum of blocks or below 0,
        `PoolExhausted` if the allocator has too few; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
        >>> state.ensure_capacity(9)
        >>> state.blocks, state.len
        ([0, 1, 2], 0)
        """
        cdef int64_t target = read_count(target_len)
        cdef pp_status status = self.c_ensure_capacity(target)
        if status != PP_OK:
            length = integer("target_len", target_len)
            raise self.failed(status, length, needed_blocks(length, self.block_size) - self.num_blocks)

    def append(self, n=1):
        """Makes room for n more tokens and counts them; returns their slots, an int64 array (n,).

        Takes new blocks as needed, and copies each shared block that the tokens will be written to, in every attached
        pool. `KvCachePool.append` then writes K and V into the slots. Raises `ValueError` past the maximum of blocks or
        below 0, `PoolExhausted` when the allocator has too few; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> PagedSeqState(BlockAllocator(8), block_size=4).append(2)
        array([0, 1])
        """
        cdef int64_t number = read_count(n)
        cdef int64_t wanted = self.c_blocks_to_append(number)
        cdef int64_t *slots_out
        cdef pp_status status
        if wanted < 0:
            if wanted == OVER_MAXIMUM:
                raise self.failed(PP_OVER_MAXIMUM, self.length + integer("n", n), 0)
            raise self.failed(PP_INVALID_ARGUMENT, integer("n", n), 0)
        if wanted > FEW_BLOCKS and wanted > self.allocator.c_available():  # rather than no memory for the slots
            raise self.failed(PP_EXHAUSTED, number, wanted)
        slots = new_int64(number, &slots_out)
        status = self.c_append(number, slots_out)
        if status != PP_OK:
            raise self.failed(status, number, wanted)
        return slots

    def truncate(self, len):
        """Keeps the first `len` tokens and frees every block after them, including reserved ones.

        Raises `ValueError` when `len` is below 0, above the present length or within blocks that `drop_before` freed,
        `InvalidBlock` when a block was freed by someone else; then nothing has changed.

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
                raise ValueError(f"cannot truncate to {number} tokens: the first {start} were freed")
            raise ValueError(f"cannot truncate {self.length} tokens to {integer('len', len)}")
        if status != PP_OK:
            raise self.failed(status, number, 0)

    def drop_before(self, position):
        """Frees the blocks that hold only tokens before `position`, such as tokens behind a sliding window.

        Does not change `len` or the remaining blocks. The table has -1 in place of the freed blocks, and attention with
        `window_left` does not read these entries. Raises `ValueError` when `position` is below 0, `InvalidBlock` when a
        block was freed by someone else; then nothing has changed.

        >>> from pagepool import BlockAllocator
        >>> state = PagedSeqState(BlockAllocator(8), block_size=4)
        >>> slots = state.append(11)
        >>> state.drop_before(6)
        >>> state.blocks, state.first_block, state.len
        ([1, 2], 1, 11)
        """
        cdef int64_t number = read_count(position)
        cdef pp_status status = self.c_drop_before(number)
        if number < 0 and not self.is_closed:
            raise ValueError(f"position must be 0 or more, not {position}")
        if status != PP_OK:
            raise self.failed(status, number, 0)

    def fork(self):
        """Returns a new state with the same tokens and label. Both share the blocks that hold tokens.

        Blocks that this state only reserved stay its own. Raises `PoolError` when a block has as many references as a
        count can hold, `InvalidBlock` when one was freed by someone else, `MemoryError`; then nothing has changed.
        """
        cdef PagedSeqState child
        cdef int32_t first = self.first_block, held = <int32_t>self.c_needed(self.length)
        if self.is_closed:
            raise self.failed(PP_INVALID_ARGUMENT, 0, 0)
        child = PagedSeqState(self.allocator, self.block_size, self.max_blocks_per_seq)
        cdef pp_status status = self.allocator.c_share_n(self.c_blocks + first, held - first)
        if status == PP_OVER_MAXIMUM:
            raise PoolError(f"cannot fork: a count of references would pass its maximum of {INT32_MAX}")
        if status != PP_OK:
            raise self.failed(status, self.length, 0)
        memcpy(child.c_blocks, self.c_blocks, <size_t>held * sizeof(int32_t))
        with cython.critical_section(self):
            child._label = self._label
        child.first_block = first
        child.num_blocks = held
        child.length = self.length
        return child

    def adopt(self, blocks, num_tokens=None):
        """Starts an empty sequence with tokens that have their K and V in blocks, for example in cached ones.

        Copies no page; the first `append` into a shared last block copies that page. Raises `ValueError` when the
        state is not empty, the maximum of blocks is exceeded, the number of blocks does not fit `num_tokens`, or the
        match is closed or has another allocator, `InvalidBlock` for a block that is free or out of range; then nothing
        has changed.

        Parameters
        ----------
        blocks
            A `PrefixMatch`: the sequence takes its references over and the match is closed. Or ids in order, as a
            sequence of integers or an array: adds one reference to each, and the caller still frees its own.
        num_tokens
            Tokens in these blocks, if `blocks` are ids; the last block may be partly filled. By default all blocks
            are full.

        Examples
        --------
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
        if isinstance(blocks, PrefixMatch):
            self.adopt(*(<PrefixMatch>blocks).found(self.allocator, num_tokens))
            (<PrefixMatch>blocks).close()
            return
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
                raise ValueError(f"{number} tokens do not match {ids.count} blocks of {self.block_size}")
        finally:
            release_ids(&ids)

    def release(self):
        """Frees all blocks; `len` becomes 0 and the state can be used again.

        Raises `InvalidBlock` when a block was freed by someone else; then nothing has changed.
        """
        cdef pp_status status = self.c_release()
        if status != PP_OK:
            raise self.failed(status, 0, 0)

    def close(self):
        """Frees all blocks. Later calls raise `StaleHandle`, but a second `close` does nothing.

        Raises as `release` does.
        """
        cdef pp_status status = PP_OK if self.is_closed else self.c_close()
        if status != PP_OK:
            raise self.failed(status, 0, 0)

    @property
    def blocks(self):
        """A new list of the ids of its blocks, reserved ones too, from `first_block` on."""
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
        """The table itself: a live, read-only int32 memoryview of `max_blocks_per_seq` ids; zeros follow the blocks.

        It stays valid after the state is deleted; all its ids are 0 then.
        """
        return memoryview(self.memory).toreadonly()

    cdef object failed(self, pp_status status, object number, object wanted):
        """The exception for a status: `number` tokens were asked for (in all, or more), and `wanted` blocks."""
        if self.is_closed:
            return closed("the sequence", self.label)
        if status == PP_OVER_MAXIMUM:
            needed = needed_blocks(number, self.block_size)
            return ValueError(f"{number} tokens need {needed} blocks, the maximum is {self.max_blocks_per_seq}")
        if status == PP_EXHAUSTED:
            return self.allocator.refused(wanted)
        if status == PP_INVALID_BLOCK:
            return InvalidBlock(f"one of the {self.num_blocks} blocks of the sequence was freed by someone else")
        if status == PP_NO_MEMORY:
            return MemoryError(f"no memory to take {wanted} blocks")
        return ValueError(f"the number of tokens cannot be {number}")


cdef object needed_blocks(object length, object block_size):
    return -(-length // block_size)
