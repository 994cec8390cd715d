"""Which block is evicted when room is needed, and what each group of blocks keeps reserved.

A cached block is in use, when somebody else has a reference to it, or evictable. The policy's lists have both kinds,
since a block becomes evictable when its last user frees it, on any thread and without a call of the cache. When the
policy chooses a node whose block is in use, the node moves to the list `in_use`. Each eviction looks at two nodes of
that list and returns those whose blocks are no longer used to the policy. When the policy has no node left although
some block is evictable, a call looks through the whole list, once. When the policy chooses a node whose group has no
more blocks than its reservation, the node moves to the list `reserved` of its group until the group has more.
"""

cimport cython
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.memory.allocator cimport BlockAllocator, pp_get_count
from pagepool.memory.block_refs cimport CachedRefs
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport CLEARED, REMOVED, STORED
from pagepool.prefix.radix_tree cimport (
    IN_USE,
    LISTED,
    RESERVED,
    Node,
    NodeTable,
    list_clear,
    list_is_sound,
    list_push,
    list_remove,
)

from pagepool._arguments import integer
from pagepool.prefix.gittins import GittinsPolicy
from pagepool.prefix.policies import LruPolicy, PriorityPolicy

__all__ = ["POLICIES", "CacheReservations"]

POLICIES = {
    "lru": LruPolicy,
    "gittins": GittinsPolicy,
    "priority": PriorityPolicy,
}

cdef enum:
    MOST_GROUPS = 255
    AT_ONCE = 64  # references that are dropped with the lock of the allocator taken once


cdef int mark_of(group) except -1:
    number = group if PyLong_CheckExact(group) else integer("a group", group)
    if not 0 <= number < MOST_GROUPS:
        raise ValueError(f"a group must be from 0 to {MOST_GROUPS - 1}, not {number}")
    return number + 1


@cython.no_gc_clear  # __dealloc__ gives blocks back to the allocator
@cython.final
cdef class CachedBlocks:
    """The blocks that a prefix cache holds a reference to. Internal: `PrefixCache` finds prompts and keeps blocks."""

    def __cinit__(self, BlockAllocator allocator not None, int32_t block_size, str policy not None, int hash_bits):
        cdef int mark
        list_clear(&self.in_use)
        for mark in range(256):
            list_clear(&self.reserved[mark])
        self.highest_mark = CACHED
        self.allocator = allocator
        self.refs = CachedRefs(allocator)
        self.tree = NodeTable(block_size, hash_bits)
        self.policy = POLICIES[policy](self.tree, allocator.max_capacity)
        self.node_memory = PageBuffer(allocator.max_capacity, "i")
        self.node_of = <int32_t *>self.node_memory.base

    def __dealloc__(self):
        cdef int32_t node
        if self.node_of != NULL:
            for node in range(self.tree.num_made):
                if self.tree.nodes[node].block >= 0:
                    self.refs.c_drop_n(&self.tree.nodes[node].block, 1)

    cdef int reset(self) except -1:
        """Drops every reference, the highest id first: the lowest is the next to be handed out."""
        cdef int32_t block
        cdef int mark
        blocks = self.list_blocks()
        blocks.sort(reverse=True)
        for block in blocks:
            self.node_of[block] = 0
            self.refs.c_drop_n(&block, 1)
        if self.log is not None:
            self.log.c_add(CLEARED, -1, -1)
        self.cleared += self.num_cached
        self.forgotten += self.num_cached
        self.num_cached = 0
        self.num_reserved = 0
        list_clear(&self.in_use)
        for mark in range(256):
            self.group_size[mark] = 0
            list_clear(&self.reserved[mark])
        self.policy.c_clear()
        self.tree.c_clear()
        return 0

    cdef list list_blocks(self):
        cdef Node *nodes = self.tree.nodes
        cdef int32_t node
        return [nodes[node].block for node in range(self.tree.num_made) if nodes[node].block >= 0]

    cdef uint8_t c_mark_of(self, int32_t node) noexcept:
        return self.refs.counts.marks[self.tree.nodes[node].block]

    cdef bint c_in_use(self, int32_t node) noexcept:
        return pp_get_count(&self.allocator.c_counts[self.tree.nodes[node].block]) > 1

    cdef void c_put(self, int32_t node, int32_t block) noexcept:
        cdef uint8_t mark = self.refs.counts.marks[block]
        self.tree.nodes[node].block = block
        self.node_of[block] = node + 1
        self.group_size[mark] += 1
        self.highest_mark = max(self.highest_mark, <int>mark)
        self.num_cached += 1
        self.inserted += 1
        if self.log is not None:
            self.log.c_add(STORED, node, block)
        self.policy.c_insert(node)

    cdef void c_touch(self, int32_t node) noexcept:
        if self.tree.nodes[node].place != LISTED:
            self.c_bring_back(node)
        self.policy.c_touch(node)

    cdef void c_give_place(self, int32_t node, int32_t block) noexcept:
        """The node keeps its group and its place in the policy's lists."""
        cdef int32_t old = self.tree.nodes[node].block
        self.refs.c_mark(block, self.c_mark_of(node))
        self.tree.nodes[node].block = block
        self.node_of[block] = node + 1
        self.node_of[old] = 0
        if self.log is not None:
            self.log.c_add(REMOVED, node, old)
            self.log.c_add(STORED, node, block)
        self.inserted += 1
        self.cleared += 1
        self.refs.c_drop_n(&old, 1)

    cdef int32_t c_drop(self, int32_t node) noexcept:
        """Without a block the node is a ghost, and the policy may delete ghosts in c_evicted: the pin prevents it."""
        cdef int32_t block = self.tree.nodes[node].block
        self.group_size[self.c_mark_of(node)] -= 1
        self.tree.nodes[node].block = -1
        self.node_of[block] = 0
        self.num_cached -= 1
        if self.log is not None:
            self.log.c_add(REMOVED, node, block)
        self.tree.c_pin(node)
        self.policy.c_evicted(node)
        self.tree.c_unpin(node)
        return block

    cdef bint c_discard(self, int32_t block) noexcept:
        """The policy is told of an eviction."""
        cdef int32_t node = self.node_of[block] - 1
        if node < 0:
            return False
        if self.tree.nodes[node].place != LISTED:
            self.c_bring_back(node)
        block = self.c_drop(node)
        self.refs.c_drop_n(&block, 1)
        self.cleared += 1
        self.forgotten += 1
        return True

    cdef void c_set_aside(self, int32_t node, uint8_t place) noexcept:
        self.policy.c_unlink(node)
        self.tree.nodes[node].place = place
        if place == IN_USE:
            list_push(&self.in_use, self.tree.nodes, node)
        else:
            list_push(&self.reserved[self.c_mark_of(node)], self.tree.nodes, node)
            self.num_reserved += 1

    cdef void c_bring_back(self, int32_t node) noexcept:
        if self.tree.nodes[node].place == IN_USE:
            list_remove(&self.in_use, self.tree.nodes, node)
        else:
            list_remove(&self.reserved[self.c_mark_of(node)], self.tree.nodes, node)
            self.num_reserved -= 1
        self.tree.nodes[node].place = LISTED
        self.policy.c_link(node)

    cdef void c_return_unused(self, int32_t most) noexcept:
        cdef int32_t node
        for _ in range(min(most, self.in_use.size)):
            node = self.in_use.head
            if self.c_in_use(node):
                list_remove(&self.in_use, self.tree.nodes, node)
                list_push(&self.in_use, self.tree.nodes, node)
            else:
                self.c_bring_back(node)

    cdef int32_t c_surplus(self) noexcept:
        cdef int mark
        if self.num_reserved:
            for mark in range(1, self.highest_mark + 1):
                if self.reserved[mark].size and self.group_size[mark] > self.reservation[mark]:
                    return self.reserved[mark].head
        return -1

    cdef int32_t c_victim(self, uint8_t own, bint *all_seen) noexcept:
        cdef int32_t node = self.c_surplus()
        if node < 0:
            self.c_return_unused(2)
            node = self.policy.c_victim()
        if node < 0 and self.in_use.size and not all_seen[0] and self.refs.c_idle(1, self.highest_mark) > 0:
            self.c_return_unused(self.in_use.size)
            all_seen[0] = True
            node = self.policy.c_victim()
        return self.reserved[own].head if node < 0 else node

    cdef int64_t c_evict(self, int64_t n, uint8_t own) noexcept:
        """O(groups) a block, amortised, since a node leaves the policy's lists at most once before its block is free
        or its group has more blocks; once a call O(blocks in use), see the top of this file."""
        cdef bint all_seen = False
        cdef int32_t dropped[AT_ONCE]
        cdef int64_t done = 0, num_dropped = 0
        cdef int32_t node
        cdef uint8_t mark
        while done < n:
            node = self.c_victim(own, &all_seen)
            if node < 0:
                break
            if self.tree.nodes[node].place != LISTED:
                self.c_bring_back(node)
            mark = self.c_mark_of(node)
            if self.c_in_use(node):
                self.c_set_aside(node, IN_USE)
            elif mark != own and self.group_size[mark] <= self.reservation[mark]:
                self.c_set_aside(node, RESERVED)
            else:
                dropped[num_dropped] = self.c_drop(node)
                num_dropped += 1
                done += 1
                if num_dropped == AT_ONCE:
                    self.refs.c_drop_n(dropped, num_dropped)
                    num_dropped = 0
        self.refs.c_drop_n(dropped, num_dropped)
        self.evicted += done
        return done

    cdef int64_t c_protected(self, uint8_t mark) noexcept:
        """Blocks in use count towards the reservation first: nobody can evict them anyway."""
        cdef int64_t idle = self.refs.c_idle(mark, mark)
        return max(<int64_t>0, min(idle, self.reservation[mark] - (self.group_size[mark] - idle)))

    cdef int64_t c_protected_from(self, uint8_t own) noexcept:
        cdef int64_t blocks = 0
        cdef int mark
        for mark in range(1, self.highest_mark + 1):
            if self.reservation[mark] and mark != own:
                blocks += self.c_protected(mark)
        return blocks

    cdef str audit(self):
        """The first equation that does not hold, as a sentence, or None. O(nodes + tokens)."""
        cdef Node *nodes = self.tree.nodes
        cdef int64_t of_group[256]
        cdef int32_t node, cached = 0, aside = 0
        cdef int64_t reserved = 0
        cdef int mark
        broken = self.tree.audit()
        if broken is not None:
            return broken
        for mark in range(256):
            of_group[mark] = 0
            reserved += self.reserved[mark].size
            if not list_is_sound(&self.reserved[mark], nodes):
                return f"the list of reserved blocks of group {mark - 1} is broken"
            node = self.reserved[mark].head
            while node >= 0:
                if nodes[node].place != RESERVED or self.c_mark_of(node) != mark:
                    return f"node {node} is not reserved for group {mark - 1}"
                node = nodes[node].next
        for node in range(self.tree.num_made):
            if nodes[node].block >= 0:
                cached += 1
                aside += nodes[node].place != LISTED
                of_group[self.c_mark_of(node)] += 1
                if self.node_of[nodes[node].block] != node + 1:
                    return f"node {node} has block {nodes[node].block}, whose owner is another"
                if self.allocator.c_ref_count(nodes[node].block) < 1:
                    return f"cached block {nodes[node].block} is free"
        for mark in range(256):
            if of_group[mark] != self.group_size[mark]:
                return f"{of_group[mark]} blocks of group {mark - 1} are cached, not {self.group_size[mark]}"
        if aside != self.in_use.size + reserved or reserved != self.num_reserved:
            return f"{aside} nodes are aside, not {self.in_use.size} in use and {self.num_reserved} reserved"
        if cached != self.num_cached or not list_is_sound(&self.in_use, nodes):
            return f"{cached} blocks are cached, not {self.num_cached}, or the list of those in use is broken"
        if self.inserted - self.evicted - self.cleared != cached:
            return f"{self.inserted} inserted - {self.evicted} evicted - {self.cleared} cleared are not {cached}"
        return self.refs.audit(cached) or self.policy.audit(cached - aside)


@cython.final
@cython.auto_pickle(False)
cdef class CacheReservations:
    """How many blocks each group keeps when others need room: `PrefixCache.reservations`.

    A group is a number from 0 to 254, given to `cache_blocks`: a tenant's, or 0 for nobody's. While a group has no more
    cached blocks than it has reserved, `evict` spares them, unless it is for that group: those then go last. A block
    that was spared goes first as soon as its group has more.

    >>> from pagepool import BlockAllocator, PrefixCache
    >>> allocator = BlockAllocator(4)
    >>> cache = PrefixCache(allocator, block_size=1)
    >>> cache.reservations.set(1, 2)
    >>> for group, token in ((1, 7), (1, 8), (2, 9)):
    ...     blocks = [allocator.allocate()]
    ...     taken = cache.cache_blocks([token], blocks, group=group)
    ...     allocator.free(blocks)
    >>> cache.reservations.evictable(), cache.evict(3), cache.reservations.cached(1)
    (1, 1, 2)
    >>> cache.evict(3, group=1)
    2
    """

    cdef CachedBlocks blocks
    cdef object cache  # the lock of all that is here is its own

    def __cinit__(self, CachedBlocks blocks not None, cache not None):
        self.blocks = blocks
        self.cache = cache

    def set(self, group, blocks):
        """Reserves `blocks` for `group` from now on; 0, as at first: none. Raises `ValueError` for a group that is not
        from 0 to 254, or a number below 0."""
        cdef int mark = mark_of(group)
        reservation = integer("blocks", blocks)
        if reservation < 0:
            raise ValueError(f"a reservation must be 0 blocks or more, not {reservation}")
        with cython.critical_section(self.cache):
            self.blocks.reservation[mark] = min(reservation, self.blocks.allocator.max_capacity)
            self.blocks.highest_mark = max(self.blocks.highest_mark, mark)

    def get(self, group):
        """The reservation of `group`. Raises as `set`."""
        cdef int mark = mark_of(group)
        with cython.critical_section(self.cache):
            return self.blocks.reservation[mark]

    def cached(self, group):
        """How many blocks of `group` are cached, in use or not. Raises as `set`."""
        cdef int mark = mark_of(group)
        with cython.critical_section(self.cache):
            return self.blocks.group_size[mark]

    def evictable(self, group=0):
        """What `evict` could free now, for `group`. O(groups). Raises as `set`."""
        cdef int mark = mark_of(group)
        with cython.critical_section(self.cache):
            return self.blocks.refs.c_idle(1, self.blocks.highest_mark) - self.blocks.c_protected_from(<uint8_t>mark)

    def protected(self, group):
        """How many of these are of `group` and spared when others need room. Raises as `set`."""
        cdef int mark = mark_of(group)
        with cython.critical_section(self.cache):
            return self.blocks.c_protected(<uint8_t>mark)
