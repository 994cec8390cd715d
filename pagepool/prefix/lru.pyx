"""Least recently used: one list, whoever is found moves to its recent end."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.prefix.policy cimport EvictionPolicy

__all__ = ["LruPolicy"]


@cython.final
@cython.auto_pickle(False)
cdef class LruPolicy(EvictionPolicy):
    """Evicts the block that was looked up or cached the longest time ago: what every policy starts from."""

    cdef void c_touch_run(self, int32_t first, int32_t n) noexcept:
        self.c_move_run(first, n, 0)
