"""Eviction: the blocks of a prefix cache, and the order in which they are evicted.

A cached block is either in use (another reference to it exists) or evictable. The policy's lists have both kinds: a
block becomes evictable when its last user frees it, on any thread and without a call of the cache. If the policy
chooses a node with a block in use, the node moves to the list `in_use`. Each eviction checks two nodes of that list and
returns them to the policy if they are unused. If the policy has no node left although a block is evictable, a call
checks the whole list once.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport PP_OK
from pagepool.memory.allocator cimport BlockAllocator, pp_get_count
from pagepool.memory.block_refs cimport CachedRefs
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport CLEARED, REMOVED, STORED
from pagepool.prefix.radix_tree cimport (
    IN_USE,
    LISTED,
    Node,
    NodeTable,
    list_clear,
    list_is_sound,
    list_push,
    list_remove,
)

from pagepool.prefix.gittins import GittinsPolicy
from pagepool.prefix.policies import LruPolicy

__all__ = ["POLICIES"]

POLICIES = {
    "lru": LruPolicy,
    "gittins": GittinsPolicy,
}

cdef enum:
    AT_ONCE = 64  # number of references to drop for each acquisition of the allocator's lock


@cython.no_gc_clear  # __dealloc__ frees blocks of the allocator
@cython.final
cdef class CachedBlocks:
    """The blocks that a prefix cache holds a reference to. Internal: `PrefixCache` finds prompts and keeps blocks."""

    def __cinit__(self, BlockAllocator allocator not None, int32_t block_size, str policy not None):
        list_clear(&self.in_use)
        self.allocator = allocator
        self.refs = CachedRefs(allocator)
        self.tree = NodeTable(block_size)
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
        """Drops every reference, highest id first, so that the lowest id is the next to be handed out."""
        cdef int32_t block
        blocks = self.list_blocks()
        blocks.sort(reverse=True)
        for block in blocks:
            self.node_of[block] = 0
            self.refs.c_drop_n(&block, 1)
        if self.log is not None:
            self.log.c_add(CLEARED, -1, -1)
        self.cleared += self.num_cached
        self.epoch += 1
        self.num_cached = 0
        list_clear(&self.in_use)
        self.policy.c_clear()
        self.tree.c_clear()
        return 0

    cdef list list_blocks(self):
        cdef Node *nodes = self.tree.nodes
        cdef int32_t node
        return [nodes[node].block for node in range(self.tree.num_made) if nodes[node].block >= 0]

    cdef bint c_in_use(self, int32_t node) noexcept:
        return pp_get_count(&self.allocator.c_counts[self.tree.nodes[node].block]) > 1

    cdef void c_put(self, int32_t node, int32_t block) noexcept:
        self.tree.nodes[node].block = block
        self.node_of[block] = node + 1
        self.num_cached += 1
        self.inserted += 1
        if self.log is not None:
            self.log.c_add(STORED, node, block)
        if self.queue is not None:
            self.queue.offered[block] = False
        self.policy.c_insert(node)

    cdef void c_touch(self, int32_t node) noexcept:
        if self.tree.nodes[node].place != LISTED:
            self.c_bring_back(node)
        self.policy.c_touch(node)

    cdef void c_give_place(self, int32_t node, int32_t block) noexcept:
        """Keeps the position of the node in the policy's lists."""
        cdef int32_t old = self.tree.nodes[node].block
        self.tree.nodes[node].block = block
        self.node_of[block] = node + 1
        self.node_of[old] = 0
        if self.log is not None:
            self.log.c_add(REMOVED, node, old)
            self.log.c_add(STORED, node, block)
        if self.queue is not None:
            self.queue.offered[block] = self.queue.offered[old]
        self.inserted += 1
        self.cleared += 1
        self.refs.c_drop_n(&old, 1)

    cdef int32_t c_drop(self, int32_t node) noexcept:
        """Pinned, because the node has no block for a moment, and the policy may delete such ghosts in c_evicted."""
        cdef int32_t block = self.tree.nodes[node].block
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
        """Reports an eviction to the policy."""
        cdef int32_t node = self.node_of[block] - 1
        if node < 0:
            return False
        if self.tree.nodes[node].place != LISTED:
            self.c_bring_back(node)
        block = self.c_drop(node)
        self.refs.c_drop_n(&block, 1)
        self.cleared += 1
        return True

    cdef void c_set_aside(self, int32_t node) noexcept:
        self.policy.c_unlink(node)
        self.tree.nodes[node].place = IN_USE
        list_push(&self.in_use, self.tree.nodes, node)

    cdef void c_bring_back(self, int32_t node) noexcept:
        list_remove(&self.in_use, self.tree.nodes, node)
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

    cdef int32_t c_victim(self, bint *all_seen) noexcept:
        cdef int32_t node
        self.c_return_unused(2)
        node = self.policy.c_victim()
        if node < 0 and self.in_use.size and not all_seen[0] and self.refs.c_idle() > 0:
            self.c_return_unused(self.in_use.size)
            all_seen[0] = True
            node = self.policy.c_victim()
        return node

    cdef int64_t c_evict(self, int64_t n) noexcept:
        """Amortised O(1) per block, because a node leaves the policy's lists at most once before its block is free.
        Once per call O(blocks in use), see the top of this file."""
        cdef bint all_seen = False
        cdef int32_t dropped[AT_ONCE]
        cdef int64_t done = 0, num_dropped = 0
        cdef int32_t node
        while done < n:
            node = self.c_victim(&all_seen)
            if node < 0:
                break
            if self.c_in_use(node):
                self.c_set_aside(node)
            else:
                if self.queue is not None:
                    self.queue.dropped += not self.queue.c_offer(node)
                dropped[num_dropped] = self.c_drop(node)
                num_dropped += 1
                done += 1
                if num_dropped == AT_ONCE:
                    self.refs.c_drop_n(dropped, num_dropped)
                    num_dropped = 0
        self.refs.c_drop_n(dropped, num_dropped)
        self.evicted += done
        return done

    cdef int64_t c_pass(self, int32_t root, const int32_t *tokens, int64_t n) noexcept:
        """Find or cache one block after the other. The pin on the last node keeps the path to it alive."""
        cdef NodeTable tree = self.tree
        cdef int64_t i, leading = 0
        cdef int32_t node = root, child, block
        tree.c_pin(node)
        for i in range(n):
            child = tree.c_find(node, tokens + i * tree.block_size)
            if child < 0:
                child = tree.c_add(node, tokens + i * tree.block_size)
            tree.c_pin(child)
            tree.c_unpin(node)
            node = child
            if tree.nodes[node].block >= 0:
                self.c_touch(node)
                leading += leading == i
            elif self.refs.c_allocate(&block) == PP_OK:
                self.c_put(node, block)
            elif self.policy.c_refuses(node):
                self.inserted += 1
                self.evicted += 1
            elif self.c_evict(1) == 1 and self.refs.c_allocate(&block) == PP_OK:
                self.c_put(node, block)
            else:
                break
        tree.c_unpin(node)
        return leading

    cdef str audit(self):
        """Check the equations above. Return a sentence about the first broken one, or None. O(nodes + tokens)."""
        cdef Node *nodes = self.tree.nodes
        cdef int32_t node, cached = 0, aside = 0
        broken = self.tree.audit()
        if broken is not None:
            return broken
        for node in range(self.tree.num_made):
            if nodes[node].block >= 0:
                cached += 1
                aside += nodes[node].place != LISTED
                if self.node_of[nodes[node].block] != node + 1:
                    return f"node {node} has block {nodes[node].block}, whose owner is another"
                if self.allocator.c_ref_count(nodes[node].block) < 1:
                    return f"cached block {nodes[node].block} is free"
        if aside != self.in_use.size:
            return f"{aside} nodes are set aside, the list of those in use has {self.in_use.size}"
        if cached != self.num_cached or not list_is_sound(&self.in_use, nodes):
            return f"{cached} blocks are cached, not {self.num_cached}, or the list of those in use is broken"
        if self.inserted - self.evicted - self.cleared != cached:
            return f"{self.inserted} inserted - {self.evicted} evicted - {self.cleared} cleared are not {cached}"
        return self.refs.audit(cached) or self.policy.audit(cached - aside)
