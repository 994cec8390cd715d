"""By priority: a list for each from 0 to 255, as the caller of `cache_blocks` gives it."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.prefix.policy cimport EvictionPolicy

__all__ = ["PriorityPolicy"]

cdef int MOST = 255


@cython.final
@cython.auto_pickle(False)
cdef class PriorityPolicy(EvictionPolicy):
    """Evicts the block with the lowest priority, of several the least recently used. A block keeps the priority that
    it was cached with.
    """

    def __cinit__(self):
        self.takes_priority = True

    cdef void c_insert(self, int32_t node) noexcept:
        self.c_push(self.priority, node)
        self.lowest = min(self.lowest, self.priority)

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_move(node, self.table.nodes[node].list)

    cdef void c_link(self, int32_t node) noexcept:
        EvictionPolicy.c_link(self, node)
        self.lowest = min(self.lowest, <int>self.table.nodes[node].list)

    cdef int32_t c_victim(self) noexcept:
        while self.lowest < MOST and self.lists[self.lowest].size == 0:
            self.lowest += 1
        return self.lists[self.lowest].head
