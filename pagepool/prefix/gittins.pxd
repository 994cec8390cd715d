from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.grouped cimport GroupedPolicy
from pagepool.prefix.reuse_ages cimport ReuseAges


cdef class GittinsPolicy(GroupedPolicy):
    cdef ReuseAges ages
    cdef int32_t last  # the node used last, or -1
    cdef bint continued  # whether that request goes on where a cached prefix ends
    cdef int64_t next_lesson
    cdef int64_t max_ghosts
    cdef int32_t budget  # blocks to take from `victims` before all groups are looked at again
    cdef int32_t chosen  # when that was done last
    # The clock and the stamp of the cells then: they alone decide, beside the values and whom the rival follows, which
    # change with the clock.
    cdef int64_t chosen_at
    cdef unsigned long long chosen_of

    cdef void c_arrive(self, int32_t node) noexcept
    cdef void c_into_ghosts(self, int32_t node) noexcept
    cdef void c_forget_ghosts(self) noexcept
    cdef void c_tick(self, int32_t node) noexcept
    cdef void c_learn(self) noexcept
    # Of n nodes with ids in a row, of one group and as many uses, each the parent of the next; the one before them is
    # the parent of the first, and was inserted just now.
    cdef void c_insert_alike(self, int32_t first, int32_t n) noexcept
    cdef void c_used(self, int32_t first, int32_t n, bint here) noexcept
    # Whether looking at all groups now would lead to `chosen` again.
    cdef bint c_is_fresh(self) noexcept
    cdef int32_t c_choose(self) noexcept
