cimport cython


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

    # Into the list with this head.
    cdef void c_enlist(self, Link *head) noexcept
    cdef void c_delist(self) noexcept
    # The ids of its blocks, one entry for each reference.
    cdef list references(self)
