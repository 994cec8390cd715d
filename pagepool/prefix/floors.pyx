"""CacheFloors: blocks of one group that are not evicted for another."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.memory.kept cimport KeptBlocks
from pagepool.prefix.node cimport Node, list_clear, list_is_sound, list_push, list_remove
from pagepool.prefix.node_table cimport NodeTable

import operator

__all__ = ["CacheFloors"]

cdef int MOST_GROUPS = 255


@cython.final
@cython.auto_pickle(False)
cdef class CacheFloors:
    """What each group of blocks keeps when others need room: `PrefixCache.floors`.

    A group is a number from 0 to 254, given to `cache_blocks`: a tenant's, or 0 for nobody's. While no more blocks of a
    group are cached than its floor, `evict` spares them, unless it is for that group: those then go last. A block that
    was spared goes first as soon as its group has more. All of it is O(1) a block, amortised.

    >>> from pagepool import BlockAllocator, PrefixCache
    >>> allocator = BlockAllocator(4)
    >>> cache = PrefixCache(allocator, block_size=1)
    >>> cache.floors.set(1, 2)
    >>> for group, token in ((1, 7), (1, 8), (2, 9)):
    ...     blocks = [allocator.allocate()]
    ...     kept = cache.cache_blocks([token], blocks, group=group)
    ...     allocator.free(blocks)
    >>> cache.floors.evictable(), cache.evict(3), cache.floors.cached(1)
    (1, 1, 2)
    >>> cache.evict(3, group=1)
    2
    """

    def __cinit__(self, NodeTable table not None, KeptBlocks kept not None):
        self.table = table
        self.kept = kept
        self.top = 1
        self.c_clear()

    def set(self, group, blocks):
        """The floor of `group` is `blocks` from now on; 0, as at first: none. Raises `ValueError` for a group that is
        not from 0 to 254, or a floor below 0."""
        cdef int mark = self.mark_of(group)
        cdef Node *nodes = self.table.nodes
        cdef int64_t over
        cdef int32_t node
        floor = operator.index(blocks)
        if floor < 0:
            raise ValueError(f"a floor must be 0 blocks or more, not {floor}")
        self.least[mark] = min(floor, self.kept.allocator.max_capacity)
        self.top = max(self.top, mark)
        over = self.cached_blocks[mark] - self.least[mark]
        while over > 0 and self.aside[mark].size:
            node = self.aside[mark].head
            list_remove(&self.aside[mark], nodes, node)
            nodes[node].held = DUE
            list_push(&self.due, nodes, node)
            over -= 1

    def get(self, group):
        """The floor of `group`. Raises as `set`."""
        return self.least[self.mark_of(group)]

    def cached(self, group):
        """How many blocks of `group` are cached, in use or not. Raises as `set`."""
        return self.cached_blocks[self.mark_of(group)]

    def evictable(self, group=0):
        """What `evict` could free now, for `group`. O(groups). Raises as `set`."""
        return self.c_idle() - self.c_protected(self.mark_of(group))

    def spared(self, group):
        """How many of them are of `group` and spared when others need room. Raises as `set`."""
        cdef int mark = self.mark_of(group)
        return self.c_spared(mark)

    cdef int mark_of(self, group) except -1:
        number = operator.index(group)
        if not 0 <= number < MOST_GROUPS:
            raise ValueError(f"a group must be from 0 to {MOST_GROUPS - 1}, not {number}")
        return number + 1

    cdef void c_added(self, uint8_t mark) noexcept:
        cdef Node *nodes = self.table.nodes
        cdef int32_t node
        self.cached_blocks[mark] += 1
        self.top = max(self.top, <int>mark)
        if self.aside[mark].size and self.cached_blocks[mark] > self.least[mark]:
            node = self.aside[mark].head
            list_remove(&self.aside[mark], nodes, node)
            nodes[node].held = DUE
            list_push(&self.due, nodes, node)

    cdef bint c_protects(self, int32_t node, uint8_t own) noexcept:
        cdef uint8_t mark = self.kept.counts.marks[self.table.nodes[node].block]
        return self.cached_blocks[mark] <= self.least[mark] and mark != own

    cdef int32_t c_next_due(self) noexcept:
        """Those whose group has fallen to its floor again are spared again: once for each time they became due."""
        cdef int32_t node = self.due.head
        while node >= 0 and self.c_protects(node, 0):
            self.c_take_back(node)
            self.c_spare(node)
            node = self.due.head
        return node

    cdef int32_t c_last_resort(self, uint8_t own) noexcept:
        cdef int mark
        for mark in range(1, self.top + 1):
            if self.aside[mark].size and self.cached_blocks[mark] > self.least[mark]:
                return self.aside[mark].head
        return self.aside[own].head

    cdef void c_spare(self, int32_t node) noexcept:
        cdef Node *nodes = self.table.nodes
        nodes[node].held = SPARED
        list_push(&self.aside[self.kept.counts.marks[nodes[node].block]], nodes, node)

    cdef void c_take_back(self, int32_t node) noexcept:
        cdef Node *nodes = self.table.nodes
        if nodes[node].held == DUE:
            list_remove(&self.due, nodes, node)
        else:
            list_remove(&self.aside[self.kept.counts.marks[nodes[node].block]], nodes, node)
        nodes[node].held = LINKED

    cdef int64_t c_idle(self) noexcept:
        cdef int64_t idle = 0
        cdef int mark
        for mark in range(1, self.top + 1):
            idle += self.kept.c_idle(mark)
        return idle

    cdef int64_t c_spared(self, uint8_t mark) noexcept:
        """Blocks in use count, and nobody takes them anyhow: the floor less those is what the idle ones are for."""
        cdef int64_t idle = self.kept.c_idle(mark)
        return max(<int64_t>0, min(idle, self.least[mark] - (self.cached_blocks[mark] - idle)))

    cdef int64_t c_protected(self, uint8_t own) noexcept:
        cdef int64_t blocks = 0
        cdef int mark
        for mark in range(1, self.top + 1):
            if self.least[mark] and mark != own:
                blocks += self.c_spared(mark)
        return blocks

    cdef int64_t c_num_aside(self) noexcept:
        cdef int64_t count = self.due.size
        cdef int mark
        for mark in range(1, self.top + 1):
            count += self.aside[mark].size
        return count

    cdef void c_clear(self) noexcept:
        cdef int mark
        list_clear(&self.due)
        for mark in range(256):
            self.cached_blocks[mark] = 0
            list_clear(&self.aside[mark])

    cdef str audit(self):
        """The first equation that does not hold, as a sentence, or None. O(nodes)."""
        cdef Node *nodes = self.table.nodes
        cdef int64_t cached[256]
        cdef int64_t num_aside = 0
        cdef int32_t node
        cdef int mark
        for mark in range(256):
            cached[mark] = 0
        for node in range(self.table.num_made):
            if nodes[node].block >= 0:
                cached[self.kept.counts.marks[nodes[node].block]] += 1
                num_aside += nodes[node].held == SPARED or nodes[node].held == DUE
        for mark in range(1, 256):
            if cached[mark] != self.cached_blocks[mark]:
                return f"{cached[mark]} blocks of group {mark - 1} are cached, not {self.cached_blocks[mark]}"
            if not list_is_sound(&self.aside[mark], nodes):
                return f"the list of spared blocks of group {mark - 1} is broken"
            node = self.aside[mark].head
            while node >= 0:
                if nodes[node].held != SPARED or self.kept.counts.marks[nodes[node].block] != mark:
                    return f"node {node} is not spared for group {mark - 1}"
                node = nodes[node].next
        if not list_is_sound(&self.due, nodes):
            return "the list of blocks that are due is broken"
        if num_aside != self.c_num_aside():
            return f"{num_aside} nodes are spared or due, not {self.c_num_aside()}"
        return None
