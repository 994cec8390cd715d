from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.radix_tree cimport Name, NamedBlock


cdef class PageQueue:
    # Copies of pages that wait to be written. The cache adds pages inside its critical section; one thread takes them.
    #   first <= next <= first + room: page number s, for first <= s < next, is at s % room
    #   offered[b]: the page of block b was added since the block was cached, or came from the store
    cdef readonly BlockAllocator allocator
    cdef readonly int32_t block_size
    cdef readonly int64_t page_bytes
    cdef readonly int64_t room
    cdef NamedBlock *waiting
    cdef int32_t *tokens  # block_size of each page
    cdef PageBuffer pages
    cdef PageBuffer offered_memory
    cdef uint8_t *offered
    cdef uint64_t first  # atomic
    cdef uint64_t next  # atomic
    cdef uint64_t recent[2 * 64]  # names of the last blocks of found prefixes, number s at s % 64; each word is atomic
    cdef uint64_t num_found  # atomic
    cdef uint64_t num_taken
    cdef public long long dropped  # evicted pages that found no room, and pages of closed pools

    # Copies the page of a block, unless it was offered before. False when the queue is full. O(page_bytes).
    cdef bint c_offer(self, const NamedBlock *named, const int32_t *tokens) noexcept
    # Notes the use of the prefix that ends with the block of this name.
    cdef void c_note_found(self, Name name) noexcept
