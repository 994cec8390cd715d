"""The eviction policy `lru`, and the bound of all policies, by Belady."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.radix_tree cimport LISTED, Node, NodeTable, list_clear, list_is_sound, list_push, list_remove

import numpy as np

__all__ = ["LruPolicy", "belady_pass"]

cdef struct Use:
    int64_t next  # position of the next use of the block, or a number above all positions
    int32_t block


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


def belady_pass(ids, ends, capacity):
    """Run the optimal eviction policy, which knows all prompts in advance. O(n log n).

    Parameters
    ----------
    ids : ndarray of int32, shape (n,)
        Block ids of all prompts, one prompt after the other. Two ids are equal if all tokens up to the block are equal.
    ends : ndarray of int64, shape (num_prompts,)
        The end of each prompt in `ids`.
    capacity : int
        Number of blocks of the cache.

    Returns
    -------
    hits, evictions : int
        Hits in the leading blocks of prompts, and evictions. A block that is not cached counts as evicted.

    Raises
    ------
    ValueError
        If an id or the capacity is below 0, or `ends` do not rise to n.

    Examples
    --------
    >>> belady_pass(np.array([0, 1, 2, 0, 1, 2], np.int32), np.array([1, 2, 3, 4, 5, 6]), 2)  # a loop of three
    (2, 2)
    """
    blocks = np.ascontiguousarray(ids, np.int32)
    stops = np.ascontiguousarray(ends, np.int64)
    if capacity < 0 or (blocks.size and blocks.min() < 0):
        raise ValueError(f"ids and capacity must be 0 or more, not {min(capacity, blocks.min(initial=0))}")
    last = stops[stops.size - 1] if stops.size else 0
    if last != blocks.size or (np.diff(stops, prepend=0) < 0).any():
        raise ValueError(f"ends must rise to the number of ids, {blocks.size}, not to {last}")
    if blocks.size == 0:
        return 0, 0
    if blocks.max() >= 4 * blocks.size:
        blocks = np.unique(blocks, return_inverse=True)[1].astype(np.int32)
    places = np.full(int(blocks.max()) + 1, -1, np.int64)
    next_use = np.empty(blocks.size, np.int64)
    heap = np.empty(2 * blocks.size, np.int64)
    cdef const int32_t[::1] c_ids = blocks
    cdef const int64_t[::1] c_ends = stops
    cdef int64_t[::1] c_places = places, c_next = next_use, c_heap = heap
    cdef int64_t room = min(capacity, blocks.size), hits, evicted = 0, i, n = blocks.size
    with nogil:
        for i in range(n - 1, -1, -1):
            c_next[i] = c_places[c_ids[i]] if c_places[c_ids[i]] >= 0 else n + i
            c_places[c_ids[i]] = i
        c_places[:] = -1
        hits = belady_run(
            &c_ids[0], &c_ends[0], c_ends.shape[0], &c_next[0], &c_places[0], <Use *>&c_heap[0], room, &evicted
        )
    return hits, evicted


cdef int64_t belady_run(
    const int32_t *ids, const int64_t *ends, int64_t num_prompts, int64_t *next_use, int64_t *cached, Use *heap,
    int64_t capacity, int64_t *evicted
) noexcept nogil:
    """cached[b] is the position of the next use of block b, or -1. A heap entry with another position is out of
    date."""
    cdef int64_t in_heap = 0, used = 0, hits = 0, i = 0, prompt
    cdef bint leading
    cdef Use use
    for prompt in range(num_prompts):
        leading = True
        while i < ends[prompt]:
            use.block = ids[i]
            use.next = next_use[i]
            i += 1
            if cached[use.block] >= 0:
                hits += leading
            else:
                leading = False
                if used == capacity:
                    while in_heap and cached[heap[0].block] != heap[0].next:
                        in_heap -= 1
                        pop(heap, in_heap)
                    evicted[0] += 1
                    if in_heap == 0 or heap[0].next <= use.next:
                        continue
                    cached[heap[0].block] = -1
                    in_heap -= 1
                    pop(heap, in_heap)
                else:
                    used += 1
            cached[use.block] = use.next
            push(heap, in_heap, use)
            in_heap += 1
    return hits


cdef void push(Use *heap, int64_t size, Use use) noexcept nogil:
    cdef int64_t at = size, above
    while at:
        above = (at - 1) // 2
        if heap[above].next >= use.next:
            break
        heap[at] = heap[above]
        at = above
    heap[at] = use


cdef void pop(Use *heap, int64_t size) noexcept nogil:
    """`size` without the first."""
    cdef Use use = heap[size]
    cdef int64_t at = 0, below = 1
    while below < size:
        if below + 1 < size and heap[below + 1].next > heap[below].next:
            below += 1
        if heap[below].next <= use.next:
            break
        heap[at] = heap[below]
        at = below
        below = 2 * at + 1
    heap[at] = use
