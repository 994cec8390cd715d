"""RootKeys: which node is the root of which key, both ways, so that a root goes without memory."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.node cimport Node

__all__ = ["RootKeys"]


@cython.final
@cython.auto_pickle(False)
cdef class RootKeys:
    """The keys of a `NodeTable`. Internal.

    >>> type(RootKeys()).__name__
    'RootKeys'
    """

    def __cinit__(self):
        self.roots = {}
        self.keys = []

    cdef int64_t add(self, bytes key, int32_t node) except -1:
        if self.count == len(self.keys):
            self.keys.append(None)
        self.roots[key] = node
        self.keys[self.count] = key
        self.count += 1
        return self.count - 1

    cdef void c_remove(self, int64_t place, Node *nodes) noexcept:
        """The last key takes its place."""
        cdef bytes last = self.keys[self.count - 1]
        cdef int32_t node
        del self.roots[self.keys[place]]
        self.count -= 1
        self.keys[self.count] = None
        if place < self.count:
            self.keys[place] = last
            node = self.roots[last]
            nodes[node].hash = place

    cdef bint c_is_of(self, int64_t place, int32_t node):
        return 0 <= place < self.count and self.roots.get(self.keys[place]) == node

    cdef void c_clear(self) noexcept:
        self.roots.clear()
        self.keys.clear()
        self.count = 0
