"""A node of the prefix tree, and lists of nodes that are linked through the nodes themselves."""

from libc.stdint cimport int32_t, uint8_t, uint64_t


cdef enum:
    NOWHERE = -2  # next_in_bucket of a node that is in no bucket


# 64 bytes.
cdef struct Node:
    uint64_t hash  # of its parent and its tokens, where it is in a bucket; the place of a root's key
    int32_t parent  # -1 for a root
    int32_t root  # of its tree; its own for a root
    int32_t next_in_bucket
    int32_t block  # -1 when it has none, or is not alive
    int32_t num_children
    int32_t last_child  # the child found or added last, or -1: where the next walk looks first
    int32_t first_child
    int32_t previous_sibling
    int32_t next_sibling
    int32_t previous
    int32_t next
    int32_t list  # of the policy's
    int32_t cached_children  # of the policy's
    uint8_t uses  # of the policy's
    uint8_t ghost  # without a block, yet remembered by the policy
    uint8_t held  # out of the policy's lists: found in use when its turn to be evicted came, or as floors.pxd says
    uint8_t alive


cdef extern from *:
    void ask_line "__builtin_prefetch"(const void *place) noexcept nogil


# So many bytes are on their way to the first cache.
cdef inline void ask(const void *place, size_t num_bytes) noexcept nogil:
    cdef size_t at
    for at in range(0, num_bytes, 64):
        ask_line(<const char *>place + at)


# Oldest first. size nodes are linked from head to tail by next, and back by previous; -1 ends both ways.
cdef struct NodeList:
    int32_t head
    int32_t tail
    int32_t size


cdef inline void list_clear(NodeList *self) noexcept nogil:
    self.head = -1
    self.tail = -1
    self.size = 0


# The n nodes from `first` to `last` of it, which stay linked with each other.
cdef inline void list_cut(NodeList *self, Node *nodes, int32_t first, int32_t last, int32_t n) noexcept nogil:
    cdef int32_t before = nodes[first].previous
    cdef int32_t after = nodes[last].next
    if before < 0:
        self.head = after
    else:
        nodes[before].next = after
    if after < 0:
        self.tail = before
    else:
        nodes[after].previous = before
    self.size -= n


cdef inline void list_remove(NodeList *self, Node *nodes, int32_t node) noexcept nogil:
    list_cut(self, nodes, node, node, 1)


# Nodes first, first + 1, ... last of it, wherever they are; most often each comes before the one with the id below.
cdef inline void list_remove_run(NodeList *self, Node *nodes, int32_t first, int32_t last) noexcept nogil:
    cdef int32_t low
    while last >= first:
        low = last
        while low > first and nodes[low].next == low - 1:
            low -= 1
        list_cut(self, nodes, last, low, last - low + 1)
        last = low - 1


# n nodes that are linked with each other, from `first` to `last`.
cdef inline void list_append(NodeList *self, Node *nodes, int32_t first, int32_t last, int32_t n) noexcept nogil:
    nodes[first].previous = self.tail
    nodes[last].next = -1
    if self.tail < 0:
        self.head = first
    else:
        nodes[self.tail].next = first
    self.tail = last
    self.size += n


cdef inline void list_push(NodeList *self, Node *nodes, int32_t node) noexcept nogil:
    list_append(self, nodes, node, node, 1)


# Whether links and size agree; every node of it must be alive.
cdef inline bint list_is_sound(const NodeList *self, const Node *nodes) noexcept nogil:
    cdef int32_t node = self.head, before = -1, size = 0
    while node >= 0 and size <= self.size:
        if nodes[node].previous != before or not nodes[node].alive:
            return False
        before = node
        node = nodes[node].next
        size += 1
    return node < 0 and before == self.tail and size == self.size
