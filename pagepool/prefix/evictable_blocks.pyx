"""EvictableBlocks: which node has which block, and who goes when room is needed. All of it wants the GIL."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.memory.allocator cimport BlockAllocator, pp_get_count
from pagepool.memory.kept cimport KeptBlocks
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.event_log cimport CLEARED, REMOVED, STORED
from pagepool.prefix.floors cimport HELD, LINKED, CacheFloors
from pagepool.prefix.node cimport Node, list_clear, list_is_sound, list_push, list_remove
from pagepool.prefix.node_table cimport NodeTable

from pagepool.prefix.policies import POLICIES

__all__ = ["EvictableBlocks"]


@cython.no_gc_clear  # __dealloc__ gives blocks back to the allocator
cdef class EvictableBlocks:
    """The blocks that a prefix cache holds a reference to. Internal: what finds and caches prompts is CachedBlocks."""

    def __cinit__(self, BlockAllocator allocator not None, int32_t block_size, str policy not None, int hash_bits):
        list_clear(&self.held)
        self.allocator = allocator
        self.kept = KeptBlocks(allocator)
        self.table = NodeTable(block_size, hash_bits)
        self.floors = CacheFloors(self.table, self.kept)
        self.order = POLICIES[policy](self.table, allocator.max_capacity)
        self.owners_memory = PageBuffer(allocator.max_capacity, "i")
        self.owners = <int32_t *>self.owners_memory.base

    def __dealloc__(self):
        cdef int32_t node
        if self.owners != NULL:
            for node in range(self.table.num_made):
                if self.table.nodes[node].block >= 0:
                    self.kept.c_drop(self.table.nodes[node].block)

    cdef int reset(self) except -1:
        """Drops every reference, the highest id first: the lowest is the next to be handed out."""
        cdef int32_t block
        blocks = self.list_blocks()
        blocks.sort(reverse=True)
        for block in blocks:
            self.owners[block] = 0
            self.kept.c_drop(block)
        if self.log is not None:
            self.log.c_add(CLEARED, -1, -1)
        self.cleared += self.num_cached
        self.forgotten += self.num_cached
        self.num_cached = 0
        list_clear(&self.held)
        self.floors.c_clear()
        self.order.c_clear()
        self.table.c_clear()
        return 0

    cdef list list_blocks(self):
        cdef Node *nodes = self.table.nodes
        cdef int32_t node
        return [nodes[node].block for node in range(self.table.num_made) if nodes[node].block >= 0]

    cdef void c_pin(self, int32_t node) noexcept:
        self.table.nodes[node].num_children += 1

    cdef void c_unpin(self, int32_t node) noexcept:
        self.table.nodes[node].num_children -= 1
        self.table.c_collect(node)

    cdef void c_relink(self, int32_t node) noexcept:
        if self.table.nodes[node].held == HELD:
            self.table.nodes[node].held = LINKED
            list_remove(&self.held, self.table.nodes, node)
        else:
            self.floors.c_take_back(node)
        self.order.c_link(node)

    cdef void c_put_run(self, int32_t first, int32_t n, const int32_t *blocks) noexcept:
        cdef Node *nodes = self.table.nodes + first
        cdef int32_t i
        for i in range(n):
            nodes[i].block = blocks[i]
            self.owners[blocks[i]] = first + i + 1
            self.floors.c_added(self.kept.counts.marks[blocks[i]])
            if self.log is not None:
                self.log.c_add(STORED, first + i, blocks[i])
        self.num_cached += n
        self.inserted += n
        self.order.c_insert_run(first, n)

    cdef void c_give_place(self, int32_t node, int32_t block) noexcept:
        """It stays whose it was, where it is among those that go, and in its list: for the policy nothing happens."""
        cdef int32_t old = self.table.nodes[node].block
        self.kept.c_mark(block, self.kept.counts.marks[old])
        self.table.nodes[node].block = block
        self.owners[block] = node + 1
        self.owners[old] = 0
        if self.log is not None:
            self.log.c_add(REMOVED, node, old)
            self.log.c_add(STORED, node, block)
        self.inserted += 1
        self.cleared += 1
        self.kept.c_drop(old)

    cdef int32_t c_drop_run(self, int32_t node, int64_t most, uint8_t own) noexcept:
        """The policy may forget ghosts meanwhile, these among them: all are pinned until they have been dropped."""
        cdef Node *nodes = self.table.nodes
        cdef int64_t *cached = self.floors.cached_blocks
        cdef const int64_t *least = self.floors.least
        cdef const uint8_t *marks = self.kept.counts.marks
        cdef int32_t blocks[AT_ONCE]
        cdef int32_t step = 1, n = 1, done = 0, next = node, block = nodes[node].block, i
        cdef uint8_t mark
        if most > 1 and self.floors.due.size == 0:
            n = self.order.c_victims(node, <int32_t>min(most, <int64_t>AT_ONCE), &step)
        while True:
            blocks[done] = block
            nodes[next].block = -1
            nodes[next].num_children += 1
            self.owners[block] = 0
            cached[marks[block]] -= 1
            if self.log is not None:
                self.log.c_add(REMOVED, next, block)
            done += 1
            next += step
            if done == n:
                break
            block = nodes[next].block
            mark = marks[block]
            if pp_get_count(&self.allocator.c_counts[block]) > 1 or (cached[mark] <= least[mark] and mark != own):
                break
            if self.held.size and self.c_held_returns(2):
                break
        self.num_cached -= done
        self.evicted += done
        self.order.c_evicted_run(node, done, step)
        for i in range(done):
            next = node + i * step
            nodes[next].num_children -= 1
            if nodes[next].num_children == 0 and not nodes[next].ghost:
                self.table.c_collect(next)
        self.kept.c_drop_n(blocks, done)
        return done

    cdef bint c_discard(self, int32_t block) noexcept:
        """For the policy it is an eviction like any other."""
        cdef int32_t node = self.owners[block] - 1
        if node < 0:
            return False
        if self.table.nodes[node].held:
            self.c_relink(node)
        self.c_drop_run(node, 1, 0)
        self.evicted -= 1
        self.cleared += 1
        self.forgotten += 1
        return True

    cdef bint c_in_use(self, int32_t node) noexcept:
        return pp_get_count(&self.allocator.c_counts[self.table.nodes[node].block]) > 1

    cdef bint c_held_returns(self, int32_t most) noexcept:
        cdef Node *nodes = self.table.nodes
        cdef int32_t node = self.held.head
        most = min(most, self.held.size)
        for _ in range(most):
            if not self.c_in_use(node):
                return True
            node = nodes[node].next
        for _ in range(most):
            node = self.held.head
            list_remove(&self.held, nodes, node)
            list_push(&self.held, nodes, node)
        return False

    cdef int32_t c_return_held(self, int32_t most) noexcept:
        """Looks at up to `most` held nodes, the longest held first, and gives the policy those that are free again."""
        cdef Node *nodes = self.table.nodes
        cdef int32_t node, size = self.held.size
        for _ in range(min(most, size)):
            node = self.held.head
            list_remove(&self.held, nodes, node)
            if self.c_in_use(node):
                list_push(&self.held, nodes, node)
            else:
                nodes[node].held = LINKED
                self.order.c_link(node)
        return size - self.held.size

    cdef int32_t c_victim(self, uint8_t own) noexcept:
        """Who goes next, or -1; for the moment in a list of the policy, in use or not."""
        cdef int32_t node = self.floors.c_next_due()
        if node < 0:
            self.c_return_held(2)
            node = self.order.c_victim()
            if node < 0:
                self.c_return_held(self.held.size)
                node = self.order.c_victim()
            if node < 0:
                node = self.floors.c_last_resort(own)
        if node >= 0 and self.table.nodes[node].held:
            self.c_relink(node)
        return node

    cdef int64_t c_evict(self, int64_t n, uint8_t own) noexcept:
        """A node in use moves to `held`, at most once until it is free: with two looked at a turn, O(1) amortised. One
        of a group at its floor is spared, at most once until the group has more."""
        cdef int64_t done = 0
        cdef int32_t node
        while done < n:
            node = self.c_victim(own)
            if node < 0:
                break
            if self.c_in_use(node):
                self.order.c_unlink(node)
                self.table.nodes[node].held = HELD
                list_push(&self.held, self.table.nodes, node)
            elif self.floors.c_protects(node, own):
                self.order.c_unlink(node)
                self.floors.c_spare(node)
            else:
                done += self.c_drop_run(node, n - done, own)
        return done

    cdef str audit(self):
        """The first equation that does not hold, as a sentence, or None. O(nodes + tokens)."""
        cdef Node *nodes = self.table.nodes
        cdef int32_t node, cached = 0, held = 0, linked
        broken = self.table.audit()
        if broken is not None:
            return broken
        for node in range(self.table.num_made):
            if nodes[node].block >= 0:
                cached += 1
                held += nodes[node].held == HELD
                if self.owners[nodes[node].block] != node + 1:
                    return f"node {node} has block {nodes[node].block}, whose owner is another"
                if self.kept.counts.marks[nodes[node].block] == 0:
                    return f"block {nodes[node].block} is cached, but not marked"
                if self.allocator.c_ref_count(nodes[node].block) < 1:
                    return f"cached block {nodes[node].block} is free"
        if self.kept.c_marked() != cached:
            return f"{self.kept.c_marked()} blocks are marked, {cached} are cached"
        if cached != self.num_cached or held != self.held.size or not list_is_sound(&self.held, nodes):
            return f"{cached} blocks are cached and {held} held, not {self.num_cached} and {self.held.size}"
        if self.inserted - self.evicted - self.cleared != cached:
            return f"{self.inserted} inserted - {self.evicted} evicted - {self.cleared} cleared are not {cached}"
        linked = cached - held - <int32_t>self.floors.c_num_aside()
        return self.kept.audit() or self.floors.audit() or self.order.audit(linked)
