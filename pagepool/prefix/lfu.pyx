"""Least frequently used: a list for each number of uses, of which 255 is the largest that is counted."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.prefix.policy cimport EvictionPolicy

__all__ = ["LfuPolicy"]

cdef int MOST = 255


@cython.final
@cython.auto_pickle(False)
cdef class LfuPolicy(EvictionPolicy):
    """Evicts the block with the fewest uses, of several the least recently used; what is evicted forgets its uses."""

    cdef void c_insert(self, int32_t node) noexcept:
        self.c_push(1, node)
        self.lowest = 1

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_move(node, min(MOST, self.table.nodes[node].list + 1))

    cdef void c_touch_run(self, int32_t first, int32_t n) noexcept:
        cdef int32_t end = first + n, linked
        while first < end:
            linked = self.c_linked(first, end - first)
            self.c_move_linked(first, linked, min(MOST, self.table.nodes[first].list + 1))
            first += linked

    cdef void c_link(self, int32_t node) noexcept:
        EvictionPolicy.c_link(self, node)
        self.lowest = min(self.lowest, <int>self.table.nodes[node].list)

    cdef int32_t c_victim(self) noexcept:
        while self.lowest < MOST and self.lists[self.lowest].size == 0:
            self.lowest += 1
        return self.lists[self.lowest].head
