"""Which node has which block, and who goes when room is needed; what each group keeps. All of it wants the GIL."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.memory.allocator cimport BlockAllocator, pp_get_count
from pagepool.memory.kept cimport KeptBlocks
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport CLEARED, REMOVED, STORED
from pagepool.prefix.radix_tree cimport Node, NodeTable, list_clear, list_is_sound, list_push, list_remove

import operator

from pagepool.prefix.gittins import GittinsPolicy
from pagepool.prefix.policies import ArcPolicy, LfuPolicy, LruPolicy, PriorityPolicy, S3FifoPolicy

__all__ = ["POLICIES", "CacheFloors", "EvictableBlocks"]

POLICIES = {
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "s3fifo": S3FifoPolicy,
    "arc": ArcPolicy,
    "gittins": GittinsPolicy,
    "priority": PriorityPolicy,
}

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


@cython.no_gc_clear  # __dealloc__ gives blocks back to the allocator
cdef class EvictableBlocks:
    """The blocks that a prefix cache holds a reference to. Internal: `PrefixCache` finds and keeps prompts."""

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
