from libc.stdint cimport int32_t, int64_t, uint64_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport IdArray
from pagepool.memory.block_refs cimport BlockRefs
from pagepool.memory.shared_pages cimport pp_shared_view


cdef class SharedIndex:
    cdef BlockAllocator allocator
    cdef pp_shared_view *view
    cdef int32_t block_size
    cdef long long looked_up
    cdef long long hits

    # The arguments are those of PrefixCache, read: `key` from root_key, tokens as int32.
    cdef tuple match(self, const int32_t[::1] row, bytes key, BlockRefs held, bint is_use)
    cdef int64_t cached_tokens(self, const int32_t[::1] row, bytes key) except -1
    cdef int64_t insert(self, const int32_t[::1] row, bytes key, IdArray *blocks, uint64_t epoch) except -1
    cdef int64_t evict(self, int64_t n) except -1
    cdef int64_t forget(self, const int32_t *blocks, int64_t n) except -1
    cdef int64_t count(self, bint only_idle) noexcept
    cdef uint64_t inserted(self) noexcept
    cdef uint64_t epoch(self) noexcept
    cdef dict stats(self)
    cdef int check(self) except -1
    cdef int check_alive(self) except -1
