cimport cython
from libc.stdint cimport int32_t


# A list through the holders themselves: entering and leaving cost four stores, and the GIL guards it.
#   link.next.previous == link == link.previous.next; an empty list's head is linked to itself
cdef struct Link:
    Link *previous
    Link *next
    void *holder  # NULL in the head


@cython.no_gc  # here, too: what is derived from it in another module asks this file
cdef class Holder:
    cdef Link link
    cdef object _label

    cdef void c_enlist(self, HolderRegistry registry) noexcept
    cdef void c_delist(self) noexcept
    # The ids of its blocks, one entry for each reference.
    cdef list references(self)


@cython.no_gc  # here, too: what is derived from it in another module asks this file
cdef class HolderRegistry:
    cdef Link head
    cdef list others  # weak references to holders of other types
    cdef object __weakref__

    cdef list holders(self)
    cdef int check_references(self, object others) except -1
    # What a subclass knows: ids below this were handed out at least once; 0 for a free block, -1 out of range.
    cdef int32_t c_ids_used(self) noexcept nogil
    cdef int32_t c_ref_count(self, int32_t block) noexcept nogil
    # 0 when blocks may have so many tokens; else how many those of a pool have.
    cdef int32_t c_other_block_size(self, int32_t block_size) noexcept nogil
    # The tokens of a block that a holder is to have: `block_size`, or if that is None those of a pool, else 16.
    cdef int32_t read_block_size(self, object block_size) except -1
