"""By priority: a list for each from 0 to 255, as the caller of `cache_blocks` gives it."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagepool.prefix.policy cimport EvictionPolicy
from pagepool.prefix.terms cimport TermQueue

__all__ = ["PriorityPolicy"]

cdef int MOST = 255


@cython.final
@cython.auto_pickle(False)
cdef class PriorityPolicy(EvictionPolicy):
    """Evicts the block with the lowest priority, of several the least recently used. A block keeps the priority that
    it was cached with, or has it for a term and then falls back to 0, as if used last among those.
    """

    def __cinit__(self):
        self.takes_priority = True
        self.terms = TermQueue()

    cdef int c_reserve(self, int64_t n) except -1:
        if self.end:
            self.terms.c_reserve(self.table.room)
        return 0

    cdef void c_insert(self, int32_t node) noexcept:
        cdef bint is_over = 0 < self.end <= self.terms.base
        cdef int list = 0 if is_over else self.priority
        self.c_push(list, node)
        self.lowest = min(self.lowest, list)
        if self.end and list:
            self.terms.c_add(node, self.end)

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_move(node, self.table.nodes[node].list)

    cdef void c_touch_run(self, int32_t first, int32_t n) noexcept:
        cdef int32_t end = first + n, linked
        while first < end:
            linked = self.c_linked(first, end - first)
            self.c_move_linked(first, linked, self.table.nodes[first].list)
            first += linked

    cdef void c_link(self, int32_t node) noexcept:
        EvictionPolicy.c_link(self, node)
        self.lowest = min(self.lowest, <int>self.table.nodes[node].list)

    cdef int32_t c_victim(self) noexcept:
        while self.lowest < MOST and self.lists[self.lowest].size == 0:
            self.lowest += 1
        return self.lists[self.lowest].head

    cdef void c_evicted(self, int32_t node) noexcept:
        self.terms.c_remove(node)
        self.c_unlink(node)

    cdef int64_t c_expire(self, uint64_t now) noexcept:
        cdef int64_t count = 0
        cdef int32_t node = self.terms.c_expired(now)
        while node >= 0:
            if self.table.nodes[node].held:
                self.table.nodes[node].list = 0
            else:
                self.c_move(node, 0)
                self.lowest = 0
            count += 1
            node = self.terms.c_expired(now)
        return count

    cdef void c_clear(self) noexcept:
        EvictionPolicy.c_clear(self)
        self.terms.c_clear()

    cdef str audit(self, int32_t num_linked):
        cdef int64_t node
        for node in range(self.terms.room):
            if self.terms.terms[node].bucket >= 0:
                if self.table.nodes[node].block < 0 or self.table.nodes[node].list == 0:
                    return f"node {node} has a term for no block, or for priority 0"
        return self.terms.audit() or EvictionPolicy.audit(self, num_linked)
