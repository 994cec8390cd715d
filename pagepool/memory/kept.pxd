from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator, KeptCounts
from pagepool.memory.page_buffer cimport PageBuffer


cdef class KeptBlocks:
    # What a keeper, a prefix cache, has one reference to. With the allocator's lock held, for each block b:
    #   marks[b] > 0: it is kept; the mark is a group of the keeper's choice, from 1 to 255
    #   idle[g] = the blocks with marks[b] == g that nobody else has a reference to, ref_count(b) == 1
    cdef readonly BlockAllocator allocator
    cdef KeptCounts counts
    cdef PageBuffer memory

    # Takes a free block and keeps it. PP_EXHAUSTED when none is free.
    cdef pp_status c_allocate(self, uint8_t mark, int32_t *block) noexcept nogil
    # Keeps n blocks more, each with one reference more, all or none. PP_INVALID_BLOCK: blocks[failed] is out of range
    # or free; PP_INVALID_ARGUMENT: it is kept already, or given twice; PP_OVER_MAXIMUM: it has 2^31 - 1 references.
    cdef pp_status c_keep_n(self, const int32_t *blocks, int64_t n, uint8_t mark, int64_t *failed) noexcept nogil
    # Drops the reference to a block that is kept.
    cdef void c_drop(self, int32_t block) noexcept nogil
    # The references to n blocks that are kept, in their order.
    cdef void c_drop_n(self, const int32_t *blocks, int64_t n) noexcept nogil
    # Another group for a block that is kept.
    cdef void c_mark(self, int32_t block, uint8_t mark) noexcept nogil
    # Blocks of a group, or of all for 0, that nobody else has a reference to. O(1), or O(groups).
    cdef int64_t c_idle(self, uint8_t mark) noexcept nogil
    # Blocks that are kept. O(blocks ever used).
    cdef int64_t c_marked(self) noexcept nogil
    cdef str audit(self)
