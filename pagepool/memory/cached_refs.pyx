"""CachedRefs: the references of a prefix cache to blocks, and how many of these nobody else uses."""

cimport cython
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
from pagepool.memory.page_buffer cimport PageBuffer

__all__ = ["CachedRefs"]


@cython.final
@cython.no_gc
cdef class CachedRefs:
    """The blocks that a prefix cache holds one reference to. Internal.

    Nobody searches for the idle ones, which have no reference but that one: the allocator counts them whenever a count
    falls to 1 or rises from it, on whatever thread.

    >>> from pagepool import BlockAllocator
    >>> CachedRefs(BlockAllocator(4)).allocator.capacity
    4
    """

    def __cinit__(self, BlockAllocator allocator not None):
        self.memory = PageBuffer(allocator.max_capacity, "B")
        self.allocator = allocator
        self.counts.marks = self.memory.base
        pp_lock_acquire(&allocator.lock)
        self.counts.next = allocator.cached
        allocator.cached = &self.counts
        pp_lock_release(&allocator.lock)

    def __dealloc__(self):
        cdef CachedCounts **link
        if self.counts.marks != NULL:
            pp_lock_acquire(&self.allocator.lock)
            link = &self.allocator.cached
            while link[0] != &self.counts:
                link = &link[0].next
            link[0] = self.counts.next
            pp_lock_release(&self.allocator.lock)

    cdef pp_status c_allocate(self, uint8_t mark, int32_t *block) noexcept nogil:
        cdef pp_status status
        pp_lock_acquire(&self.allocator.lock)
        status = self.allocator.c_take(block)
        if status == PP_OK:
            self.counts.marks[block[0]] = mark
            self.counts.idle[mark] += 1
        pp_lock_release(&self.allocator.lock)
        return status

    cdef pp_status c_add_n(self, const int32_t *blocks, int64_t n, uint8_t mark, int64_t *failed) noexcept nogil:
        cdef uint8_t *marks = self.counts.marks
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
            elif marks[block]:
                status = PP_INVALID_ARGUMENT
            elif count == INT32_MAX:
                status = PP_OVER_MAXIMUM
            else:
                pp_set_count(&counts[block], count + 1)
                if count == 1:
                    count_idle(self.allocator.cached, block, -1)
                marks[block] = mark
                i += 1
        failed[0] = i
        while status != PP_OK and i > 0:
            i -= 1
            block = blocks[i]
            if block >= 0:
                count = counts[block] - 1
                marks[block] = 0
                pp_set_count(&counts[block], count)
                if count == 1:
                    count_idle(self.allocator.cached, block, 1)
        pp_lock_release(&self.allocator.lock)
        return status

    cdef void c_drop_n(self, const int32_t *blocks, int64_t n) noexcept nogil:
        cdef uint8_t *marks = self.counts.marks
        cdef int64_t i
        pp_lock_acquire(&self.allocator.lock)
        for i in range(n):
            self.counts.idle[marks[blocks[i]]] -= self.allocator.c_counts[blocks[i]] <= 1
            marks[blocks[i]] = 0
            self.allocator.c_give_back(blocks[i])
        pp_lock_release(&self.allocator.lock)

    cdef void c_mark(self, int32_t block, uint8_t mark) noexcept nogil:
        cdef uint8_t *old = &self.counts.marks[block]
        cdef bint is_idle
        pp_lock_acquire(&self.allocator.lock)
        is_idle = self.allocator.c_counts[block] <= 1
        self.counts.idle[old[0]] -= is_idle
        self.counts.idle[mark] += is_idle
        old[0] = mark
        pp_lock_release(&self.allocator.lock)

    cdef int64_t c_idle(self, int first, int last) noexcept nogil:
        cdef int64_t count = 0
        cdef int mark
        pp_lock_acquire(&self.allocator.lock)
        for mark in range(first, last + 1):
            count += self.counts.idle[mark]
        pp_lock_release(&self.allocator.lock)
        return count

    cdef str audit(self, int64_t cached):
        cdef int64_t idle[256]
        cdef int32_t block
        cdef int mark
        pp_lock_acquire(&self.allocator.lock)
        for mark in range(256):
            idle[mark] = -self.counts.idle[mark]
        for block in range(self.allocator.taken):
            idle[self.counts.marks[block]] += self.allocator.c_counts[block] <= 1
            cached -= self.counts.marks[block] != 0
        pp_lock_release(&self.allocator.lock)
        if cached:
            return f"{cached} cached blocks have no mark"
        for mark in range(1, 256):
            if idle[mark]:
                return f"{idle[mark]} more blocks of group {mark - 1} are idle than are counted"
        return None
