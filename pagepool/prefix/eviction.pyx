"""Eviction: the blocks of a prefix cache, and the order in which they are evicted.

A cached block is either in use (another reference to it exists) or evictable. The policy's lists have both kinds: a
block becomes evictable when its last user frees it, on any thread and without a call of the cache. If the policy
chooses a node with a block in use, the node moves to the list `in_use`. Each eviction checks two nodes of that list and
returns them to the policy if they are unused. If the policy has no node left although a block is evictable, a call
checks the whole list once.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp

from pagepool.csrc cimport PP_OK
from pagepool.memory.allocator cimport BlockAllocator, pp_get_count
from pagepool.memory.block_refs cimport CachedRefs
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport REMOVED, STORED
from pagepool.prefix.radix_tree cimport (
    IN_USE,
    LISTED,
    NamedBlock,
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


cdef class BlockOrder:
    """The order in which cached blocks are evicted. Internal."""

    def __cinit__(self, NodeTable tree not None, int64_t num_blocks, str policy not None, *others):
        list_clear(&self.in_use)
        self.tree = tree
        self.policy = POLICIES[policy](tree, num_blocks)
        self.node_memory = PageBuffer(num_blocks, "i")
        self.node_of = <int32_t *>self.node_memory.base

    cdef bint c_in_use(self, int32_t node) noexcept:
        return False

    cdef bint c_has_idle(self) noexcept:
        return True

    @cython.final
    cdef void c_enter(self, int32_t node, int32_t block) noexcept:
        self.tree.nodes[node].block = block
        self.node_of[block] = node + 1
        self.num_cached += 1
        self.policy.c_insert(node)

    @cython.final
    cdef int32_t c_leave(self, int32_t node) noexcept:
        """Pinned, because the node has no block for a moment, and the policy may delete such ghosts in c_evicted."""
        cdef int32_t block = self.tree.nodes[node].block
        if self.tree.nodes[node].place != LISTED:
            self.c_bring_back(node)
        self.tree.nodes[node].block = -1
        self.node_of[block] = 0
        self.num_cached -= 1
        self.tree.c_pin(node)
        self.policy.c_evicted(node)
        self.tree.c_unpin(node)
        return block

    @cython.final
    cdef void c_touch(self, int32_t node) noexcept:
        if self.tree.nodes[node].place != LISTED:
            self.c_bring_back(node)
        self.policy.c_touch(node)

    @cython.final
    cdef void c_set_aside(self, int32_t node) noexcept:
        self.policy.c_unlink(node)
        self.tree.nodes[node].place = IN_USE
        list_push(&self.in_use, self.tree.nodes, node)

    @cython.final
    cdef void c_bring_back(self, int32_t node) noexcept:
        list_remove(&self.in_use, self.tree.nodes, node)
        self.tree.nodes[node].place = LISTED
        self.policy.c_link(node)

    @cython.final
    cdef void c_return_unused(self, int32_t most) noexcept:
        cdef int32_t node
        for _ in range(min(most, self.in_use.size)):
            node = self.in_use.head
            if self.c_in_use(node):
                list_remove(&self.in_use, self.tree.nodes, node)
                list_push(&self.in_use, self.tree.nodes, node)
            else:
                self.c_bring_back(node)

    @cython.final
    cdef int32_t c_victim(self, bint *all_seen) noexcept:
        """Amortised O(1), because a node leaves the policy's lists at most once before its block is free. Once per call
        of `evict` O(blocks in use), see the top of this file."""
        cdef int32_t node
        while True:
            self.c_return_unused(2)
            node = self.policy.c_victim()
            if node < 0 and self.in_use.size and not all_seen[0] and self.c_has_idle():
                self.c_return_unused(self.in_use.size)
                all_seen[0] = True
                node = self.policy.c_victim()
            if node < 0 or not self.c_in_use(node):
                return node
            self.c_set_aside(node)

    @cython.final
    cdef void c_clear(self) noexcept:
        """The caller has set `node_of` of all blocks to 0."""
        self.num_cached = 0
        list_clear(&self.in_use)
        self.policy.c_clear()
        self.tree.c_clear()

    cdef str audit_order(self):
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
        if aside != self.in_use.size:
            return f"{aside} nodes are set aside, the list of those in use has {self.in_use.size}"
        if cached != self.num_cached or not list_is_sound(&self.in_use, nodes):
            return f"{cached} blocks are cached, not {self.num_cached}, or the list of those in use is broken"
        return self.policy.audit(cached - aside)


@cython.no_gc_clear  # __dealloc__ frees blocks of the allocator
@cython.final
cdef class CachedBlocks(BlockOrder):
    """The blocks that a prefix cache holds a reference to. Internal: `PrefixCache` finds prompts and keeps blocks."""

    def __cinit__(self, NodeTable tree, int64_t num_blocks, str policy, BlockAllocator allocator not None):
        self.allocator = allocator
        self.refs = CachedRefs(allocator)

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
            self.log.c_clear()
        self.cleared += self.num_cached
        self.epoch += 1
        self.c_clear()
        return 0

    cdef list list_blocks(self):
        cdef Node *nodes = self.tree.nodes
        cdef int32_t node
        return [nodes[node].block for node in range(self.tree.num_made) if nodes[node].block >= 0]

    cdef bint c_in_use(self, int32_t node) noexcept:
        return pp_get_count(&self.allocator.c_counts[self.tree.nodes[node].block]) > 1

    cdef bint c_has_idle(self) noexcept:
        return self.refs.c_idle() > 0

    cdef void c_put(self, int32_t node, int32_t block) noexcept:
        self.inserted += 1
        if self.log is not None:
            self.c_log(STORED, node, block)
        if self.queue is not None:
            self.queue.offered[block] = False
        self.c_enter(node, block)

    cdef void c_log(self, int kind, int32_t node, int32_t block) noexcept:
        cdef NamedBlock named = self.tree.c_named(node, self.log.number)
        named.block = block
        self.log.c_add(kind, &named, self.tree.tokens + <size_t>node * <size_t>self.tree.block_size)

    cdef bint c_offer(self, int32_t node) noexcept:
        cdef NamedBlock named = self.tree.c_named(node, self.number)
        return self.queue.c_offer(&named, self.tree.tokens + <size_t>node * <size_t>self.tree.block_size)

    cdef void c_found(self, const int32_t *path, int64_t n) noexcept:
        cdef int64_t i
        for i in range(n):
            self.c_offer(path[i])
        if n > 0:
            self.queue.c_note_found(self.tree.c_named(path[n - 1], self.number).name)

    cdef int32_t c_last_of(self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n) noexcept:
        cdef size_t row = self.tree.block_size
        cdef int32_t node
        if n == 0 or <unsigned int>blocks[n - 1] >= <unsigned int>self.allocator.max_capacity:
            return -1
        node = self.node_of[blocks[n - 1]] - 1
        if node < 0 or self.tree.nodes[node].root != root:
            return -1
        if memcmp(self.tree.tokens + node * row, tokens + (n - 1) * row, row * sizeof(int32_t)) != 0:
            return -1
        return node

    cdef bint c_gives_way(self, int32_t node, int32_t block) noexcept:
        cdef int32_t cached = self.tree.nodes[node].block
        if cached == block or self.c_in_use(node) or self.node_of[block]:
            return False
        return self.allocator.c_ref_count(block) > 0

    cdef list names_of(self, const int32_t *blocks, int64_t n):
        cdef int64_t i
        cdef int32_t node
        cdef list names = []
        for i in range(n):
            node = self.node_of[blocks[i]] - 1 if 0 <= blocks[i] < self.allocator.max_capacity else -1
            if node >= 0:
                named = self.tree.c_named(node, self.number)
                names.append((<const char *>&named.name)[:16])
        return names

    cdef bint offer_all(self) except -1:
        cdef Node *nodes = self.tree.nodes
        cdef int32_t root, node
        for root in self.tree.roots.values():
            node = nodes[root].first_child
            while node >= 0 and node != root:
                if nodes[node].block >= 0 and not self.c_offer(node):
                    return False
                if nodes[node].first_child >= 0:
                    node = nodes[node].first_child
                    continue
                while node != root and nodes[node].next_sibling < 0:
                    node = nodes[node].parent
                node = root if node == root else nodes[node].next_sibling
        return True

    cdef void c_give_place(self, int32_t node, int32_t block) noexcept:
        """Keeps the position of the node in the policy's lists."""
        cdef int32_t old = self.tree.nodes[node].block
        self.tree.nodes[node].block = block
        self.node_of[block] = node + 1
        self.node_of[old] = 0
        if self.log is not None:
            self.c_log(REMOVED, node, old)
            self.c_log(STORED, node, block)
        if self.queue is not None:
            self.queue.offered[block] = self.queue.offered[old]
        self.inserted += 1
        self.cleared += 1
        self.refs.c_drop_n(&old, 1)

    cdef int32_t c_drop(self, int32_t node) noexcept:
        if self.log is not None:
            self.c_log(REMOVED, node, self.tree.nodes[node].block)
        return self.c_leave(node)

    cdef bint c_discard(self, int32_t block) noexcept:
        """Reports an eviction to the policy."""
        cdef int32_t node = self.node_of[block] - 1
        if node < 0:
            return False
        block = self.c_drop(node)
        self.refs.c_drop_n(&block, 1)
        self.cleared += 1
        return True

    cdef int64_t c_evict(self, int64_t n) noexcept:
        cdef bint all_seen = False
        cdef int32_t dropped[AT_ONCE]
        cdef int64_t done = 0, num_dropped = 0
        cdef int32_t node
        while done < n:
            node = self.c_victim(&all_seen)
            if node < 0:
                break
            if self.queue is not None:
                self.queue.dropped += not self.c_offer(node)
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
        cdef int32_t node, cached = self.num_cached
        broken = self.audit_order()
        if broken is not None:
            return broken
        for node in range(self.tree.num_made):
            if self.tree.nodes[node].block >= 0 and self.allocator.c_ref_count(self.tree.nodes[node].block) < 1:
                return f"cached block {self.tree.nodes[node].block} is free"
        if self.inserted - self.evicted - self.cleared != cached:
            return f"{self.inserted} inserted - {self.evicted} evicted - {self.cleared} cleared are not {cached}"
        return self.refs.audit(cached)
