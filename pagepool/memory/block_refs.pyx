"""References to blocks that no sequence holds: for the length of a call, for a match, for a prefix cache."""

cimport cython
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t

from pagepool.csrc cimport (
    PP_INVALID_ARGUMENT,
    PP_INVALID_BLOCK,
    PP_OK,
    PP_OVER_MAXIMUM,
    pp_lock_acquire,
    pp_lock_release,
    pp_status,
)
from pagepool.memory.allocator cimport BlockAllocator, CachedCounts, count_idle, pp_set_count
from pagepool.memory.arrays cimport IdArray, new_int32, read_ids, release_ids
from pagepool.memory.page_buffer cimport PageBuffer

from pagepool.errors import InvalidBlock
from pagepool._arguments import integer

__all__ = ["BlockRefs", "PrefixMatch"]


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class BlockRefs:
    """One reference to each block of a list, taken and dropped together. Internal.

    No exception or signal can interrupt between taking references and recording them. A deleted object does not drop
    its references.

    >>> from pagepool import BlockAllocator
    >>> allocator = BlockAllocator(4)
    >>> refs = BlockRefs(allocator)
    >>> refs.allocate_n(3).tolist(), len(refs)
    ([0, 1, 2], 3)
    >>> refs.give_back()
    >>> allocator.free_count, len(refs), allocator.allocate()
    (4, 0, 0)
    """

    def __cinit__(self, BlockAllocator allocator not None):
        self.allocator = allocator

    def __dealloc__(self):
        PyMem_Free(self.ids)

    def __len__(self):
        return self.count

    cdef int c_reserve(self, Py_ssize_t n) except -1:
        if self.count:
            raise ValueError(f"cannot take {n} blocks more: {self.count} are held")
        PyMem_Free(self.ids)
        self.ids = <int32_t *>PyMem_Malloc(<size_t>n * sizeof(int32_t))
        if self.ids == NULL:
            raise MemoryError(f"no memory to hold {n} blocks")
        return 0

    cdef void c_note(self, const int32_t *blocks, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i
        for i in range(n):
            self.ids[n - 1 - i] = blocks[i]
        self.count = n

    def allocate_n(self, n):
        """Takes n blocks, see `BlockAllocator.allocate_n`."""
        cdef int32_t *ids
        cdef int64_t available = self.allocator.c_available()
        number = n if PyLong_CheckExact(n) else integer("n", n)
        if number < 0:
            return self.allocator.allocate_n(number)  # which raises
        if number > available:
            raise self.allocator.refused(number)
        self.c_reserve(number)
        blocks = new_int32(number, &ids)
        if self.allocator.c_allocate_n(number, ids) != PP_OK:
            raise self.allocator.refused(number)
        self.c_note(ids, number)
        return blocks

    def share(self, blocks):
        """Takes a reference to each block, see `BlockAllocator.share`."""
        cdef IdArray array
        read_ids(blocks, &array)
        try:
            self.c_reserve(array.count)
            self.allocator.c_share_ids(&array)
            self.c_note(array.ids, array.count)
        finally:
            release_ids(&array)

    def match_prefix(self, cache, tokens, **keys):
        """Takes the cached blocks of a prompt, see `PrefixCache.match_prefix`."""
        return cache.match_held(self, tokens, **keys)

    def give_back(self):
        """Drops the references, the last one first, so that free blocks are handed out again in the same order.

        Raises `InvalidBlock` when a block was freed by someone else; then nothing has changed.
        """
        cdef Py_ssize_t count = self.count
        if count and self.allocator.c_free_n(self.ids, count) != PP_OK:
            raise InvalidBlock(f"one of the {count} blocks that are held was freed by someone else")
        self.count = 0


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class PrefixMatch:
    """The result of `PrefixCache.match_tokens`: holds one reference to each block, so the blocks are not evicted.

    `PagedSeqState.adopt(match)` takes the references over. `close()`, the end of a `with` block and garbage collection
    drop them. `blocks, num_tokens = match` passes them to the caller, and the caller frees the blocks.

    Attributes
    ----------
    blocks : int32 (n,)
        The ids, in order.
    num_tokens
        Tokens of the prompt in these blocks; the last block may match in part.

    Examples
    --------
    >>> from pagepool import BlockAllocator, PrefixCache
    >>> cache = PrefixCache(BlockAllocator(8), block_size=4)
    >>> cache.cache_blocks([1, 2, 3, 4], cache.allocator.allocate_n(1))
    1
    >>> with cache.match_tokens([1, 2, 3, 9]) as match:
    ...     match, cache.allocator.ref_count(0)
    (<PrefixMatch: 3 tokens in 1 block>, 3)
    >>> cache.allocator.ref_count(0)
    2
    """

    def __init__(self):
        raise TypeError("a PrefixMatch is made by PrefixCache.match_tokens")

    def __dealloc__(self):
        if self.refs is not None:
            self.refs.give_back()

    cdef tuple found(self, BlockAllocator allocator, object num_tokens):
        if num_tokens is not None:
            raise TypeError(f"num_tokens must be None for a match, which has {self.num_tokens} tokens")
        if allocator is not self.refs.allocator:
            raise ValueError("the match and the sequence have different allocators")
        if self.refs.count != len(self.blocks):
            raise ValueError(f"the match is closed: its {len(self.blocks)} blocks were freed or taken over")
        return self.blocks, self.num_tokens

    def close(self):
        """Drops the references; does nothing if they were dropped or taken over before.

        Raises `InvalidBlock` when one was freed by someone else; then nothing has changed.
        """
        self.refs.give_back()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __iter__(self):
        found = iter(self.found(self.refs.allocator, None))
        self.refs.count = 0
        return found

    def __repr__(self):
        n = len(self.blocks)
        return f"<PrefixMatch: {self.num_tokens} tokens in {n} block{'s' * (n != 1)}>"


cdef PrefixMatch new_match(BlockAllocator allocator):
    cdef PrefixMatch match = PrefixMatch.__new__(PrefixMatch)
    match.refs = BlockRefs(allocator)
    return match


@cython.final
@cython.no_gc
cdef class CachedRefs:
    """The blocks that a prefix cache holds one reference to. Internal.

    Idle blocks are referenced only by the cache. The allocator counts them: it updates `idle` whenever a reference
    count falls to 1 or rises from 1, on any thread.

    >>> from pagepool import BlockAllocator
    >>> CachedRefs(BlockAllocator(4)).allocator.capacity
    4
    """

    def __cinit__(self, BlockAllocator allocator not None):
        self.memory = PageBuffer(allocator.max_capacity, "B")
        self.allocator = allocator
        self.counts.is_cached = self.memory.base
        pp_lock_acquire(&allocator.lock)
        self.counts.next = allocator.cached
        allocator.cached = &self.counts
        pp_lock_release(&allocator.lock)

    def __dealloc__(self):
        cdef CachedCounts **link
        if self.counts.is_cached != NULL:
            pp_lock_acquire(&self.allocator.lock)
            link = &self.allocator.cached
            while link[0] != &self.counts:
                link = &link[0].next
            link[0] = self.counts.next
            pp_lock_release(&self.allocator.lock)

    cdef pp_status c_allocate(self, int32_t *block) noexcept nogil:
        cdef pp_status status
        pp_lock_acquire(&self.allocator.lock)
        status = self.allocator.c_take(block)
        if status == PP_OK:
            self.counts.is_cached[block[0]] = True
            self.counts.idle += 1
        pp_lock_release(&self.allocator.lock)
        return status

    cdef pp_status c_add_n(self, const int32_t *blocks, int64_t n, int64_t *failed) noexcept nogil:
        cdef uint8_t *is_cached = self.counts.is_cached
        cdef int32_t *counts = self.allocator.c_counts
        cdef pp_status status = PP_OK
        cdef int32_t block, count
        cdef int64_t i = 0
        pp_lock_acquire(&self.allocator.lock)
        while i < n and status == PP_OK:
            block = blocks[i]
            if block < 0:
                i += 1
                continue
            count = counts[block] if block < self.allocator.taken else 0
            if count == 0:
                status = PP_INVALID_BLOCK
            elif is_cached[block]:
                status = PP_INVALID_ARGUMENT
            elif count == INT32_MAX:
                status = PP_OVER_MAXIMUM
            else:
                pp_set_count(&counts[block], count + 1)
                if count == 1:
                    count_idle(self.allocator.cached, block, -1)
                is_cached[block] = True
                i += 1
        failed[0] = i
        while status != PP_OK and i > 0:
            i -= 1
            block = blocks[i]
            if block >= 0:
                count = counts[block] - 1
                is_cached[block] = False
                pp_set_count(&counts[block], count)
                if count == 1:
                    count_idle(self.allocator.cached, block, 1)
        pp_lock_release(&self.allocator.lock)
        return status

    cdef void c_drop_n(self, const int32_t *blocks, int64_t n) noexcept nogil:
        cdef int64_t i
        pp_lock_acquire(&self.allocator.lock)
        for i in range(n):
            self.counts.idle -= self.allocator.c_counts[blocks[i]] <= 1
            self.counts.is_cached[blocks[i]] = False
            self.allocator.c_give_back(blocks[i])
        pp_lock_release(&self.allocator.lock)

    cdef int64_t c_idle(self) noexcept nogil:
        cdef int64_t count
        pp_lock_acquire(&self.allocator.lock)
        count = self.counts.idle
        pp_lock_release(&self.allocator.lock)
        return count

    cdef str audit(self, int64_t cached):
        cdef int64_t found = 0, idle = 0, counted
        cdef int32_t block
        pp_lock_acquire(&self.allocator.lock)
        for block in range(self.allocator.taken):
            if self.counts.is_cached[block]:
                found += 1
                idle += self.allocator.c_counts[block] <= 1
        counted = self.counts.idle
        pp_lock_release(&self.allocator.lock)
        if found != cached:
            return f"{cached} blocks are cached, {found} are known to the allocator as such"
        return None if idle == counted else f"{idle} cached blocks are idle, {counted} are counted"
