"""ARC: recent against frequent, the border moved by what comes back (Megiddo and Modha, FAST'03)."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.node cimport Node
from pagepool.prefix.policy cimport EvictionPolicy

__all__ = ["ArcPolicy"]

cdef enum:
    RECENT
    FREQUENT
    RECENT_GHOSTS
    FREQUENT_GHOSTS


@cython.final
@cython.auto_pickle(False)
cdef class ArcPolicy(EvictionPolicy):
    """Blocks used once and blocks used again, each least recently used first, with as many ghosts as blocks.

    Room is made before it is known which block comes: the target moves when a ghost's block is cached again.
    """

    cdef void c_insert(self, int32_t node) noexcept:
        cdef Node *nodes = self.table.nodes
        cdef int64_t recent = self.lists[RECENT_GHOSTS].size, frequent = self.lists[FREQUENT_GHOSTS].size
        if nodes[node].ghost:
            if nodes[node].list == RECENT_GHOSTS:
                self.target = min(self.capacity, self.target + max(<int64_t>1, frequent // recent))
            else:
                self.target = max(<int64_t>0, self.target - max(<int64_t>1, recent // frequent))
            nodes[node].ghost = 0
            self.c_move(node, FREQUENT)
        else:
            self.c_push(RECENT, node)
        self.trim()

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_move(node, FREQUENT)

    cdef void c_touch_run(self, int32_t first, int32_t n) noexcept:
        self.c_move_run(first, n, FREQUENT)

    cdef int32_t c_victim(self) noexcept:
        if self.lists[RECENT].size and (self.lists[RECENT].size > self.target or self.lists[FREQUENT].size == 0):
            return self.lists[RECENT].head
        return self.lists[FREQUENT].head

    cdef void c_evicted(self, int32_t node) noexcept:
        self.c_keep_ghost(node, RECENT_GHOSTS if self.table.nodes[node].list == RECENT else FREQUENT_GHOSTS)
        self.trim()

    cdef void trim(self) noexcept:
        """RECENT and its ghosts are at most the capacity, all four at most twice that."""
        cdef int64_t recent = self.lists[RECENT].size
        cdef int64_t blocks = recent + self.lists[FREQUENT].size
        while self.lists[RECENT_GHOSTS].size and recent + self.lists[RECENT_GHOSTS].size > self.capacity:
            self.c_forget_oldest(RECENT_GHOSTS)
        while (
            self.lists[FREQUENT_GHOSTS].size
            and blocks + self.lists[RECENT_GHOSTS].size + self.lists[FREQUENT_GHOSTS].size > 2 * self.capacity
        ):
            self.c_forget_oldest(FREQUENT_GHOSTS)

    cdef void c_clear(self) noexcept:
        EvictionPolicy.c_clear(self)
        self.target = 0
