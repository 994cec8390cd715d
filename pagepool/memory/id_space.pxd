cimport cython
from libc.stdint cimport int32_t

from pagepool.csrc cimport pp_lock
from pagepool.memory.holders cimport HolderRegistry


@cython.no_gc  # here, too: what is derived from it in another module asks this file
cdef class IdSpace(HolderRegistry):
    # With the lock held; `taken` ids were handed out at least once:
    #   in_use = taken - num_freed            free = limit - in_use
    #   ref_counts[b] > 0                     for the in_use blocks
    #   ref_counts[b] == 0                    for those in freed[0:num_freed], each once, and for all b >= taken
    #   taken <= limit <= max_capacity        the arrays have room for max_capacity
    #   peak_in_use = max(peak, taken)        since fresh ids are taken only when no freed one is left; `peak` is the
    #                                         most that `taken` was before it fell
    cdef pp_lock lock
    cdef int32_t limit  # the capacity
    cdef readonly int32_t max_capacity
    cdef int32_t taken
    cdef int32_t num_freed
    cdef int32_t peak
    cdef int32_t[::1] freed
    cdef int32_t[::1] ref_counts
    cdef int32_t *c_freed  # == &freed[0]
    cdef int32_t *c_counts  # == &ref_counts[0]

    # With the lock held: raises the capacity, if the maximum allows, so that n fresh ids can be taken.
    cdef bint c_extend(self, int32_t n) noexcept nogil
    # How many ids there are now.
    cdef int32_t c_capacity(self) noexcept nogil
    # Blocks that are free, and those that can be taken: what the capacity may still grow by, too.
    cdef int32_t c_free_count(self) noexcept nogil
    cdef int32_t c_available(self) noexcept nogil
    # Raises the capacity to n; false when it is there already or the maximum is below.
    cdef bint c_grow(self, int32_t n) noexcept nogil
    # Lowers it to n, or as far as blocks in use allow; returns what it is then.
    cdef int32_t c_shrink(self, int32_t n) noexcept nogil
    # With the lock held: the first run of free ids from first[0] on and below `limit`, at most `most` of them. Returns
    # their number, 0 when there is none, and the first in first[0].
    cdef int32_t c_free_run(self, int32_t *first, int32_t limit, int32_t most) noexcept nogil
