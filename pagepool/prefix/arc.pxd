from libc.stdint cimport int64_t

from pagepool.prefix.policy cimport EvictionPolicy


cdef class ArcPolicy(EvictionPolicy):
    cdef int64_t target  # nodes that RECENT should have: 0 <= target <= capacity

    cdef void trim(self) noexcept
