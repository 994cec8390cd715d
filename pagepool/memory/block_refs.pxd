from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator, CachedCounts
from pagepool.memory.page_buffer cimport PageBuffer


cdef class BlockRefs:
    # References of its own to ids[:count], the last one taken first; none when count is 0.
    cdef readonly BlockAllocator allocator
    cdef int32_t *ids
    cdef Py_ssize_t count

    # Room for n references: `c_note`, of those that were just taken, cannot fail then.
    cdef int c_reserve(self, Py_ssize_t n) except -1
    cdef void c_note(self, const int32_t *blocks, Py_ssize_t n) noexcept


cdef class PrefixMatch:
    cdef BlockRefs refs
    cdef readonly object blocks
    cdef readonly int64_t num_tokens

    # Its blocks and tokens, for a sequence over `allocator` that was told `num_tokens`.
    cdef tuple found(self, BlockAllocator allocator, object num_tokens)


# One without blocks yet: what takes references for `refs` fills it.
cdef PrefixMatch new_match(BlockAllocator allocator)


cdef class CachedRefs:
    # The blocks that a prefix cache has one reference to. With the allocator's lock held, for each block b:
    #   is_cached[b]: it is one of them
    #   idle = those that nobody else has a reference to: is_cached[b] and ref_count(b) == 1
    cdef readonly BlockAllocator allocator
    cdef CachedCounts counts
    cdef PageBuffer memory

    # Takes a free block, whose one reference is the cache's. PP_EXHAUSTED when none is free.
    cdef pp_status c_allocate(self, int32_t *block) noexcept nogil
    # One reference more to each of the blocks, all or none; those below 0 are passed over. PP_INVALID_BLOCK:
    # blocks[failed] is free; PP_INVALID_ARGUMENT: it is cached already, or given twice; PP_OVER_MAXIMUM: it has
    # 2^31 - 1 references.
    cdef pp_status c_add_n(self, const int32_t *blocks, int64_t n, int64_t *failed) noexcept nogil
    # Drops the references to n cached blocks, in their order.
    cdef void c_drop_n(self, const int32_t *blocks, int64_t n) noexcept nogil
    # Those that nobody else has a reference to.
    cdef int64_t c_idle(self) noexcept nogil
    # The first equation that does not hold, as a sentence, or None; there are `cached` of them. O(blocks ever used).
    cdef str audit(self, int64_t cached)
