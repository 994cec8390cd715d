"""The eviction policies: what every policy has, and all of them but `gittins`; and the bound of all, by Belady."""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagepool.prefix.radix_tree cimport LISTED, Node, NodeTable, list_clear, list_is_sound, list_push, list_remove

import numpy as np

from pagepool._arguments import integer, real

__all__ = ["EvictionPolicy", "belady_pass"]

cdef int MOST = 255

cdef struct Use:
    int64_t next  # where the block is used next, or beyond all uses
    int32_t block


cdef struct Expiry:
    uint64_t end
    int32_t previous
    int32_t next
    int32_t bucket  # -1: the node has no expiry


cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static inline uint64_t pp_time_key(double time)
    {
        uint64_t bits;
        time += 0.0; /* -0.0 is 0.0 */
        memcpy(&bits, &time, sizeof(bits));
        return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
    }
    /* Both for bits that are not 0. */
    static inline int pp_highest_bit(uint64_t bits) { return 63 - __builtin_clzll(bits); }
    static inline int pp_lowest_bit(uint64_t bits) { return __builtin_ctzll(bits); }
    """
    uint64_t time_key "pp_time_key"(double time) noexcept nogil  # times as integers in the same order, none of them 0
    int pp_highest_bit(uint64_t bits) noexcept nogil
    int pp_lowest_bit(uint64_t bits) noexcept nogil


cdef inline int bucket_of(uint64_t end, uint64_t base) noexcept nogil:
    return 1 + pp_highest_bit(end ^ base) if end != base else 0


@cython.auto_pickle(False)
cdef class EvictionPolicy:
    """Decides which cached block goes first. Subclasses, in Cython, override the four methods of the interface.

    Internal: a cache makes the one it is asked for by name; see `POLICIES` in pagepool.prefix.eviction.
    """

    def __cinit__(self, NodeTable tree not None, int64_t capacity):
        self.tree = tree
        self.capacity = capacity
        self.num_lists = 256
        self.c_clear()

    cdef int c_reserve(self, int64_t n) except -1:
        return 0

    cdef void c_insert(self, int32_t node) noexcept:
        self.c_push(0, node)

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_move(node, 0)

    cdef bint c_refuses(self, int32_t node) noexcept:
        return False

    cdef int32_t c_victim(self) noexcept:
        return self.lists[0].head

    cdef void c_evicted(self, int32_t node) noexcept:
        self.c_unlink(node)

    cdef int64_t c_expire(self, double time) noexcept:
        return 0

    cdef void c_unlink(self, int32_t node) noexcept:
        list_remove(&self.lists[self.tree.nodes[node].list], self.tree.nodes, node)

    cdef void c_link(self, int32_t node) noexcept:
        list_push(&self.lists[self.tree.nodes[node].list], self.tree.nodes, node)

    cdef void c_push(self, int list, int32_t node) noexcept:
        self.tree.nodes[node].list = list
        list_push(&self.lists[list], self.tree.nodes, node)

    cdef void c_move(self, int32_t node, int list) noexcept:
        cdef Node *nodes = self.tree.nodes
        list_remove(&self.lists[nodes[node].list], nodes, node)
        nodes[node].list = list
        list_push(&self.lists[list], nodes, node)

    cdef void c_forget_oldest(self, int list) noexcept:
        """Drops the oldest ghost of a list, and what only the ghost kept alive."""
        cdef int32_t node = self.lists[list].head
        list_remove(&self.lists[list], self.tree.nodes, node)
        self.tree.nodes[node].ghost = 0
        self.tree.c_collect(node)

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
        """The first equation that does not hold, as a sentence, or None. `num_linked`: cached nodes not aside."""
        cdef Node *nodes = self.tree.nodes
        cdef int32_t node, linked = 0
        cdef int list
        for list in range(self.num_lists):
            if not list_is_sound(&self.lists[list], nodes):
                return f"list {list} of the policy is broken"
            node = self.lists[list].head
            while node >= 0:
                if nodes[node].list != list or nodes[node].place != LISTED:
                    return f"node {node} does not belong into list {list} of the policy"
                if nodes[node].ghost != (nodes[node].block < 0):
                    return f"node {node} is a ghost with a block, or neither"
                linked += not nodes[node].ghost
                node = nodes[node].next
        return None if linked == num_linked else f"the policy has {linked} nodes, it should have {num_linked}"


@cython.final
@cython.auto_pickle(False)
cdef class LruPolicy(EvictionPolicy):
    """Evicts the block that was looked up or cached the longest time ago: what every policy starts from."""


@cython.auto_pickle(False)
cdef class LevelPolicy(EvictionPolicy):
    """A list for each of 256 levels: evicts from the lowest level, there the least recently used. Internal."""

    cdef int lowest  # no list below it has a node

    cdef void c_link(self, int32_t node) noexcept:
        EvictionPolicy.c_link(self, node)
        self.lowest = min(self.lowest, <int>self.tree.nodes[node].list)

    cdef int32_t c_victim(self) noexcept:
        while self.lowest < MOST and self.lists[self.lowest].size == 0:
            self.lowest += 1
        return self.lists[self.lowest].head


@cython.final
@cython.auto_pickle(False)
cdef class ExpiryHeap:
    """Nodes by the time at which something of theirs ends, without a clock. Internal.

    A radix heap (Ahuja, Mehlhorn, Orlin and Tarjan, Faster algorithms for the shortest path problem, 1990): what is
    taken out never ends before what was taken out earlier, so that a bucket for each bit of a time is order enough.
    """

    # Expiries of nodes, by node; a radix heap. With base, the latest time asked for, between two calls of c_expired:
    #   end > base, and the bucket of an expiry is 1 + the highest bit in which end and base differ; bucket 0 is empty
    #   bit b of filled is set when bucket 1 + b is not empty
    cdef Expiry *expiries
    cdef int64_t room
    cdef uint64_t base
    cdef uint64_t filled
    cdef int32_t heads[65]
    cdef int32_t tails[65]

    def __cinit__(self):
        self.c_clear()

    def __dealloc__(self):
        PyMem_Free(self.expiries)

    cdef void c_clear(self) noexcept:
        cdef int bucket
        PyMem_Free(self.expiries)
        self.expiries = NULL
        self.room = 0
        self.base = self.filled = 0
        for bucket in range(65):
            self.heads[bucket] = self.tails[bucket] = -1

    cdef int c_reserve(self, int64_t room) except -1:
        """Room for the expiries of nodes 0 to room - 1."""
        cdef void *memory
        cdef int64_t node
        if room > self.room:
            memory = PyMem_Realloc(self.expiries, room * sizeof(Expiry))
            if memory == NULL:
                raise MemoryError(f"no memory for the expiries of {room} prefix nodes")
            self.expiries = <Expiry *>memory
            for node in range(self.room, room):
                self.expiries[node].bucket = -1
            self.room = room
        return 0

    cdef void c_add(self, int32_t node, uint64_t end) noexcept:
        """The node, which has none, gets an expiry after base; `c_reserve` first."""
        self.expiries[node].end = end
        self.c_push(node)

    cdef void c_push(self, int32_t node) noexcept:
        cdef Expiry *expiry = &self.expiries[node]
        cdef int bucket = bucket_of(expiry.end, self.base)
        expiry.bucket = bucket
        expiry.previous = self.tails[bucket]
        expiry.next = -1
        if expiry.previous < 0:
            self.heads[bucket] = node
        else:
            self.expiries[expiry.previous].next = node
        self.tails[bucket] = node
        if bucket:
            self.filled |= <uint64_t>1 << (bucket - 1)

    cdef void c_remove(self, int32_t node) noexcept:
        """The node has no expiry from now on, if it had one."""
        cdef Expiry *expiry
        cdef int bucket
        if node >= self.room or self.expiries[node].bucket < 0:
            return
        expiry = &self.expiries[node]
        bucket = expiry.bucket
        if expiry.previous < 0:
            self.heads[bucket] = expiry.next
        else:
            self.expiries[expiry.previous].next = expiry.next
        if expiry.next < 0:
            self.tails[bucket] = expiry.previous
        else:
            self.expiries[expiry.next].previous = expiry.previous
        if bucket and self.heads[bucket] < 0:
            self.filled &= ~(<uint64_t>1 << (bucket - 1))
        expiry.bucket = -1

    cdef int32_t c_expired(self, uint64_t now) noexcept:
        """Takes out the node whose expiry is first, of several the one added first; -1 when no other has expired.
        Callers go on until it returns -1. O(1) amortised: each look moves an expiry to a lower bucket."""
        cdef int32_t node
        if now < self.base:
            return -1
        while self.heads[0] < 0:
            # In buckets above that of now all ends are later.
            if self.filled == 0 or 1 + pp_lowest_bit(self.filled) > bucket_of(now, self.base):
                self.base = now
                return -1
            self.c_spread(1 + pp_lowest_bit(self.filled), now)
        node = self.heads[0]
        self.c_remove(node)
        return node

    cdef void c_spread(self, int bucket, uint64_t now) noexcept:
        """Moves base to the first end in the lowest bucket, at most to now, and its expiries to lower buckets."""
        cdef int32_t node = self.heads[bucket], next
        self.base = now
        while node >= 0:
            self.base = min(self.base, self.expiries[node].end)
            node = self.expiries[node].next
        node = self.heads[bucket]
        self.heads[bucket] = self.tails[bucket] = -1
        self.filled &= ~(<uint64_t>1 << (bucket - 1))
        while node >= 0:
            next = self.expiries[node].next
            self.c_push(node)
            node = next

    cdef str audit(self):
        """The first equation that does not hold, as a sentence, or None."""
        cdef int64_t node, linked = 0, number = 0
        cdef uint64_t marks = 0
        cdef int32_t before
        cdef int bucket
        for bucket in range(65):
            before, node = -1, self.heads[bucket]
            if bucket and node >= 0:
                marks |= <uint64_t>1 << (bucket - 1)
            while node >= 0:
                if self.expiries[node].previous != before or self.expiries[node].bucket != bucket:
                    return f"bucket {bucket} of expiries is broken at node {node}"
                if self.expiries[node].end <= self.base or bucket != bucket_of(self.expiries[node].end, self.base):
                    return f"the expiry of node {node} does not belong into bucket {bucket}"
                linked += 1
                before = <int32_t>node
                node = self.expiries[node].next
            if before != self.tails[bucket]:
                return f"bucket {bucket} of expiries ends at node {self.tails[bucket]}, not {before}"
        if marks != self.filled:
            return f"buckets {marks:#x} of expiries are not empty, {self.filled:#x} are marked"
        for node in range(self.room):
            number += self.expiries[node].bucket >= 0
        return None if linked == number else f"{number} nodes have expiries, {linked} are in buckets"


@cython.final
@cython.auto_pickle(False)
cdef class PriorityPolicy(LevelPolicy):
    """Evicts the block with the lowest priority, of several the least recently used. A block keeps the priority that
    it was cached with until that expires; then it has priority 0, as if used just now.
    """

    # Nodes with an expiry have a block, and a priority above 0.
    cdef ExpiryHeap expiries

    def __cinit__(self):
        self.takes_priority = True
        self.expiries = ExpiryHeap()

    cdef int c_reserve(self, int64_t n) except -1:
        if self.end:
            self.expiries.c_reserve(self.tree.room)
        return 0

    cdef void c_insert(self, int32_t node) noexcept:
        cdef bint is_over = 0 < self.end <= self.expiries.base
        cdef int list = 0 if is_over else self.priority
        self.c_push(list, node)
        self.lowest = min(self.lowest, list)
        if self.end and list:
            self.expiries.c_add(node, self.end)

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_move(node, self.tree.nodes[node].list)

    cdef void c_evicted(self, int32_t node) noexcept:
        self.expiries.c_remove(node)
        self.c_unlink(node)

    cdef int64_t c_expire(self, double time) noexcept:
        cdef uint64_t now = time_key(time)
        cdef int64_t count = 0
        cdef int32_t node = self.expiries.c_expired(now)
        while node >= 0:
            if self.tree.nodes[node].place != LISTED:
                self.tree.nodes[node].list = 0
            else:
                self.c_move(node, 0)
                self.lowest = 0
            count += 1
            node = self.expiries.c_expired(now)
        return count

    cdef void c_clear(self) noexcept:
        EvictionPolicy.c_clear(self)
        self.expiries.c_clear()

    cdef str audit(self, int32_t num_linked):
        cdef int64_t node
        for node in range(self.expiries.room):
            if self.expiries.expiries[node].bucket >= 0:
                if self.tree.nodes[node].block < 0 or self.tree.nodes[node].list == 0:
                    return f"node {node} has an expiry without a block, or with priority 0"
        return self.expiries.audit() or EvictionPolicy.audit(self, num_linked)


def belady_pass(ids, ends, capacity):
    """Hits, in the leading runs of the prompts, and evictions of the best cache of `capacity` blocks.

    ids       of the blocks of all prompts, one prompt after the other: int32 `(n,)`; equal where all tokens are
    ends      where each prompt ends in `ids`: int64 `(num_prompts,)`
    capacity  blocks; a block that does not come in counts as evicted

    O(n log n). Raises `ValueError` when an id or the capacity is below 0, or when `ends` do not rise to n.

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
    """cached[b] is where block b is used next, or -1; a use in the heap that says another place is out of date."""
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
