from libc.stdint cimport int32_t

from pagepool.memory.allocator cimport BlockAllocator


cdef class BlockRefs:
    # References of its own to ids[:count], the last one taken first; none when count is 0.
    cdef readonly BlockAllocator allocator
    cdef int32_t *ids
    cdef Py_ssize_t count

    # Room for n references: `c_note`, of those that were just taken, cannot fail then.
    cdef int c_reserve(self, Py_ssize_t n) except -1
    cdef void c_note(self, const int32_t *blocks, Py_ssize_t n) noexcept
