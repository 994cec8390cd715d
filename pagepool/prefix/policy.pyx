"""EvictionPolicy: what every policy has, and the four methods that make one."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagepool.prefix.node cimport Node, list_append, list_clear, list_cut, list_is_sound, list_push, list_remove
from pagepool.prefix.node_table cimport NodeTable
from pagepool.prefix.terms cimport time_key

from pagepool.arguments import integer, real

__all__ = ["EvictionPolicy"]


@cython.auto_pickle(False)
cdef class EvictionPolicy:
    """Decides which cached block goes first. Subclasses, in Cython, override the four methods of the interface.

    Internal: a cache makes the one it is asked for by name; see `POLICIES` in pagepool.prefix.policies.
    """

    def __cinit__(self, NodeTable table not None, int64_t capacity):
        self.table = table
        self.capacity = capacity
        self.num_lists = 256
        self.c_clear()

    cdef int c_reserve(self, int64_t n) except -1:
        return 0

    cdef void c_insert(self, int32_t node) noexcept:
        self.c_push(0, node)

    cdef void c_insert_run(self, int32_t first, int32_t n) noexcept:
        cdef int32_t node
        for node in range(first, first + n):
            self.c_insert(node)

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_move(node, 0)

    cdef void c_touch_run(self, int32_t first, int32_t n) noexcept:
        cdef int32_t node
        for node in range(first, first + n):
            self.c_touch(node)

    cdef bint c_refuses(self, int32_t node) noexcept:
        return False

    cdef int32_t c_victim(self) noexcept:
        return self.lists[0].head

    cdef int32_t c_victims(self, int32_t node, int32_t n, int32_t *step) noexcept:
        return 1

    cdef void c_evicted(self, int32_t node) noexcept:
        self.c_unlink(node)

    cdef void c_evicted_run(self, int32_t node, int32_t n, int32_t step) noexcept:
        cdef int32_t i
        for i in range(n):
            self.c_evicted(node + i * step)

    cdef int64_t c_expire(self, uint64_t now) noexcept:
        return 0

    cdef void c_unlink(self, int32_t node) noexcept:
        list_remove(&self.lists[self.table.nodes[node].list], self.table.nodes, node)

    cdef void c_link(self, int32_t node) noexcept:
        list_push(&self.lists[self.table.nodes[node].list], self.table.nodes, node)

    cdef void c_push(self, int list, int32_t node) noexcept:
        self.table.nodes[node].list = list
        list_push(&self.lists[list], self.table.nodes, node)

    cdef void c_push_run(self, int list, int32_t first, int32_t n) noexcept:
        cdef Node *nodes = self.table.nodes
        cdef int32_t node
        for node in range(first, first + n):
            nodes[node].list = list
            nodes[node].previous = node - 1
            nodes[node].next = node + 1
        list_append(&self.lists[list], nodes, first, first + n - 1, n)

    cdef void c_move(self, int32_t node, int list) noexcept:
        cdef Node *nodes = self.table.nodes
        list_remove(&self.lists[nodes[node].list], nodes, node)
        nodes[node].list = list
        list_push(&self.lists[list], nodes, node)

    cdef int32_t c_linked(self, int32_t first, int32_t n) noexcept:
        cdef Node *nodes = self.table.nodes + first
        cdef int32_t i = 1
        while i < n and nodes[i - 1].next == first + i and nodes[i].list == nodes[0].list:
            i += 1
        return i

    cdef void c_move_linked(self, int32_t first, int32_t n, int list) noexcept:
        cdef Node *nodes = self.table.nodes
        cdef int32_t last = first + n - 1, node
        list_cut(&self.lists[nodes[first].list], nodes, first, last, n)
        if nodes[first].list != list:
            for node in range(first, first + n):
                nodes[node].list = list
        list_append(&self.lists[list], nodes, first, last, n)

    cdef void c_move_run(self, int32_t first, int32_t n, int list) noexcept:
        cdef int32_t end = first + n, linked
        while first < end:
            linked = self.c_linked(first, end - first)
            self.c_move_linked(first, linked, list)
            first += linked

    cdef void c_keep_ghost(self, int32_t node, int list) noexcept:
        self.c_move(node, list)
        self.table.nodes[node].ghost = 1

    cdef void c_forget_oldest(self, int list) noexcept:
        """Drops the oldest ghost of a list, and what only the ghost kept alive."""
        cdef int32_t node = self.lists[list].head
        list_remove(&self.lists[list], self.table.nodes, node)
        self.table.nodes[node].ghost = 0
        self.table.c_collect(node)

    cdef int level_of(self, priority, str name) except -1:
        level = integer("priority", priority, 0, 255)
        if level and not self.takes_priority:
            raise ValueError(f"policy {name} takes no priority but 0, not {level}")
        return level

    cdef uint64_t end_of(self, ttl, double now, str name) except? 0:
        cdef double span
        if now != now:
            raise ValueError("now must be a time, not nan")
        if ttl is None:
            return 0
        if not self.takes_priority:
            raise ValueError(f"policy {name} takes no ttl but None, not {ttl!r}")
        span = real("ttl", ttl, low=0)
        if now + span != now + span:
            raise ValueError(f"ttl and now must add up to a time, not {ttl} and {now}")
        return time_key(now + span)

    cdef void c_clear(self) noexcept:
        cdef int list
        for list in range(self.num_lists):
            list_clear(&self.lists[list])

    cdef str audit(self, int32_t num_linked):
        """The first equation that does not hold, as a sentence, or None. `num_linked`: cached nodes not held."""
        cdef Node *nodes = self.table.nodes
        cdef int32_t node, linked = 0
        cdef int list
        for list in range(self.num_lists):
            if not list_is_sound(&self.lists[list], nodes):
                return f"list {list} of the policy is broken"
            node = self.lists[list].head
            while node >= 0:
                if nodes[node].list != list or nodes[node].held or nodes[node].ghost != (nodes[node].block < 0):
                    return f"node {node} does not belong into list {list} of the policy"
                linked += not nodes[node].ghost
                node = nodes[node].next
        return None if linked == num_linked else f"the policy has {linked} nodes, it should have {num_linked}"
