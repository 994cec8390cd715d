from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.node cimport Node


cdef class RootKeys:
    # roots = {keys[place]: node for each place < count}, where `hash` of the node is the place
    cdef dict roots
    cdef list keys
    cdef int64_t count

    # The place of a key that is new; all or nothing.
    cdef int64_t add(self, bytes key, int32_t node) except -1
    # Wants no memory.
    cdef void c_remove(self, int64_t place, Node *nodes) noexcept
    cdef bint c_is_of(self, int64_t place, int32_t node)
    cdef void c_clear(self) noexcept
