"""The eviction policy `lru`."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.radix_tree cimport LISTED, Node, NodeTable, list_clear, list_is_sound, list_push, list_remove

__all__ = ["LruPolicy"]


@cython.auto_pickle(False)
cdef class LruPolicy:
    """Evicts the least recently used block. The policy `gittins` overrides it.

    Internal: a cache makes the policy that it is asked for by name; see `POLICIES` in pagepool.prefix.eviction.
    """

    def __cinit__(self, NodeTable tree not None, int64_t capacity):
        self.tree = tree
        self.capacity = capacity
        list_clear(&self.order)

    cdef void c_insert(self, int32_t node) noexcept:
        list_push(&self.order, self.tree.nodes, node)

    cdef void c_touch(self, int32_t node) noexcept:
        list_remove(&self.order, self.tree.nodes, node)
        list_push(&self.order, self.tree.nodes, node)

    cdef bint c_refuses(self, int32_t node) noexcept:
        return False

    cdef int32_t c_victim(self) noexcept:
        return self.order.head

    cdef void c_evicted(self, int32_t node) noexcept:
        list_remove(&self.order, self.tree.nodes, node)

    cdef void c_unlink(self, int32_t node) noexcept:
        list_remove(&self.order, self.tree.nodes, node)

    cdef void c_link(self, int32_t node) noexcept:
        list_push(&self.order, self.tree.nodes, node)

    cdef void c_clear(self) noexcept:
        list_clear(&self.order)

    cdef str audit(self, int32_t num_linked):
        cdef Node *nodes = self.tree.nodes
        cdef int32_t node = self.order.head
        if not list_is_sound(&self.order, nodes):
            return "the list of the policy is broken"
        while node >= 0:
            if nodes[node].block < 0 or nodes[node].place != LISTED:
                return f"node {node} in the list of the policy has no block, or is set aside"
            node = nodes[node].next
        return None if self.order.size == num_linked else f"the policy has {self.order.size} nodes, not {num_linked}"
