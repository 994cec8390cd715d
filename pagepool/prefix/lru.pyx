"""Least recently used: one list, whoever is found moves to its recent end."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.prefix.node cimport list_cut
from pagepool.prefix.policy cimport EvictionPolicy

__all__ = ["LruPolicy"]


@cython.final
@cython.auto_pickle(False)
cdef class LruPolicy(EvictionPolicy):
    """Evicts the block that was looked up or cached the longest time ago: what every policy starts from."""

    cdef void c_insert_run(self, int32_t first, int32_t n) noexcept:
        self.c_push_run(0, first, n)

    cdef void c_touch_run(self, int32_t first, int32_t n) noexcept:
        self.c_move_run(first, n, 0)

    cdef int32_t c_victims(self, int32_t node, int32_t n, int32_t *step) noexcept:
        return self.c_linked(node, n)

    cdef void c_evicted_run(self, int32_t node, int32_t n, int32_t step) noexcept:
        list_cut(&self.lists[0], self.table.nodes, node, node + n - 1, n)
