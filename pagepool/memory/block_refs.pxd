from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator, CachedCounts
from pagepool.memory.page_buffer cimport PageBuffer


cdef class BlockRefs:
    # Holds one reference to each of ids[:count], in reverse order.
    cdef readonly BlockAllocator allocator
    cdef int32_t *ids
    cdef Py_ssize_t count

    # Makes room for n references, so that c_note cannot fail. c_note stores references that were just taken.
    cdef int c_reserve(self, Py_ssize_t n) except -1
    cdef void c_note(self, const int32_t *blocks, Py_ssize_t n) noexcept


cdef class PrefixMatch:
    cdef BlockRefs refs
    cdef readonly object blocks
    cdef readonly int64_t num_tokens

    # Returns the match's blocks and number of tokens for a sequence of `allocator`. num_tokens must be None.
    cdef tuple found(self, BlockAllocator allocator, object num_tokens)


# A match without blocks. The caller fills `refs`, `blocks` and `num_tokens`.
cdef PrefixMatch new_match(BlockAllocator allocator)


cdef class CachedRefs:
    # The blocks that a prefix cache has one reference to. With the allocator's lock held, for each block b:
    #   is_cached[b]: b is cached
    #   idle = number of blocks b with is_cached[b] and ref_count(b) == 1
    cdef readonly BlockAllocator allocator
    cdef CachedCounts counts
    cdef PageBuffer memory

    # Takes a free block for the cache. PP_EXHAUSTED when no block is free.
    cdef pp_status c_allocate(self, int32_t *block) noexcept nogil
    # Adds one reference to each of the blocks, all or none; skips ids below 0. PP_INVALID_BLOCK:
    # blocks[failed] is free; PP_INVALID_ARGUMENT: it is cached already, or given twice; PP_OVER_MAXIMUM: it has
    # 2^31 - 1 references.
    cdef pp_status c_add_n(self, const int32_t *blocks, int64_t n, int64_t *failed) noexcept nogil
    # Drops the references to n cached blocks, in their order.
    cdef void c_drop_n(self, const int32_t *blocks, int64_t n) noexcept nogil
    # Cached blocks that are referenced only by the cache.
    cdef int64_t c_idle(self) noexcept nogil
    # Checks the equations above for `cached` cached blocks. Returns a sentence about the first broken one, or None.
    # O(blocks ever used).
    cdef str audit(self, int64_t cached)
