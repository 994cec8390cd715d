"""Nodes that are not alive, in spans of ids in a row, so that a run of blocks gets nodes that lie in one piece."""

from libc.stdint cimport int32_t

from pagepool.prefix.node cimport Node


# Spans are as long as can be: what lies before and behind one is alive, or was never made. The first node of a span
# has its size in num_children, and in previous and next the spans before and behind it in a list; the last node has
# the first one in parent. `head` is the first of that list, or -1.
cdef struct UnusedNodes:
    int32_t head


cdef inline void unused_clear(UnusedNodes *self) noexcept nogil:
    self.head = -1


cdef inline void unused_link(UnusedNodes *self, Node *nodes, int32_t first, int32_t size) noexcept nogil:
    nodes[first].num_children = size
    nodes[first + size - 1].parent = first
    nodes[first].previous = -1
    nodes[first].next = self.head
    if self.head >= 0:
        nodes[self.head].previous = first
    self.head = first


cdef inline void unused_unlink(UnusedNodes *self, Node *nodes, int32_t first) noexcept nogil:
    cdef int32_t before = nodes[first].previous, after = nodes[first].next
    if before < 0:
        self.head = after
    else:
        nodes[before].next = after
    if after >= 0:
        nodes[after].previous = before


# The span of n nodes from `first` on is unused from now on; `alive` of each is 0 already. O(1).
cdef inline void unused_put(UnusedNodes *self, Node *nodes, int32_t num_made, int32_t first, int32_t n) noexcept nogil:
    cdef int32_t after = first + n
    if after < num_made and not nodes[after].alive:
        unused_unlink(self, nodes, after)
        n += nodes[after].num_children
    if first > 0 and not nodes[first - 1].alive:
        first = nodes[first - 1].parent
        n += nodes[first].num_children
        nodes[first].num_children = n
        nodes[first + n - 1].parent = first
    else:
        unused_link(self, nodes, first, n)


# The first of up to n nodes of one span, which are unused no more, and how many: 0 when there is no span. O(1).
cdef inline int32_t unused_take(UnusedNodes *self, Node *nodes, int32_t n, int32_t *first) noexcept nogil:
    cdef int32_t size
    first[0] = self.head
    if self.head < 0:
        return 0
    size = nodes[self.head].num_children
    unused_unlink(self, nodes, first[0])
    if size > n:
        unused_link(self, nodes, first[0] + n, size - n)
        return n
    return size


# How many nodes are in spans, or -1 when links, sizes and `alive` do not agree.
cdef inline int32_t unused_count(const UnusedNodes *self, const Node *nodes, int32_t num_made) noexcept nogil:
    cdef int32_t first = self.head, before = -1, count = 0, size, node
    while first >= 0:
        size = nodes[first].num_children
        if nodes[first].previous != before or size < 1 or size > num_made - first or count > num_made - size:
            return -1
        for node in range(first, first + size):
            if nodes[node].alive:
                return -1
        if nodes[first + size - 1].parent != first or (first > 0 and not nodes[first - 1].alive):
            return -1
        count += size
        before = first
        first = nodes[first].next
    return count
