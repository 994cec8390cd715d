"""S3-FIFO: three queues; newcomers must be used again while they pass the small one (Yang et al., SOSP'23)."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.node cimport Node
from pagepool.prefix.node_table cimport NodeTable
from pagepool.prefix.policy cimport EvictionPolicy

__all__ = ["S3FifoPolicy"]

cdef enum:
    SMALL
    MAIN
    GHOST
    MOST_USES = 3


@cython.final
@cython.auto_pickle(False)
cdef class S3FifoPolicy(EvictionPolicy):
    """Keeps a tenth of the cached blocks in the small queue; ghosts number at most nine tenths of the capacity."""

    def __cinit__(self, NodeTable table not None, int64_t capacity):
        self.max_ghosts = capacity - capacity // 10

    cdef void c_insert(self, int32_t node) noexcept:
        cdef Node *nodes = self.table.nodes
        nodes[node].uses = 0
        if nodes[node].ghost:
            nodes[node].ghost = 0
            self.c_move(node, MAIN)
        else:
            self.c_push(SMALL, node)

    cdef void c_touch(self, int32_t node) noexcept:
        self.table.nodes[node].uses = min(MOST_USES, self.table.nodes[node].uses + 1)

    cdef void c_touch_run(self, int32_t first, int32_t n) noexcept:
        cdef int32_t node
        for node in range(first, first + n):
            self.table.nodes[node].uses = min(MOST_USES, self.table.nodes[node].uses + 1)

    cdef int32_t c_victim(self) noexcept:
        """Each turn of the loop takes uses from a node or returns one: no more turns than uses were counted."""
        cdef Node *nodes = self.table.nodes
        cdef int64_t small, main
        cdef int32_t node
        while True:
            small = self.lists[SMALL].size
            main = self.lists[MAIN].size
            if small and (main == 0 or 10 * small >= small + main):
                node = self.lists[SMALL].head
                if nodes[node].uses <= 1:
                    return node
                nodes[node].uses = 0
            elif main:
                node = self.lists[MAIN].head
                if nodes[node].uses == 0:
                    return node
                nodes[node].uses -= 1
            else:
                return -1
            self.c_move(node, MAIN)

    cdef void c_evicted(self, int32_t node) noexcept:
        if self.table.nodes[node].list == MAIN:
            self.c_unlink(node)
            return
        self.c_keep_ghost(node, GHOST)
        if self.lists[GHOST].size > self.max_ghosts:
            self.c_forget_oldest(GHOST)
