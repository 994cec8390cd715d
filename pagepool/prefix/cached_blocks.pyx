"""CachedBlocks: which node has which block, and who goes when room is needed. All of it wants the GIL."""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp

from pagepool.csrc cimport PP_INVALID_ARGUMENT, PP_INVALID_BLOCK, PP_OK, pp_status
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.kept cimport KeptBlocks
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.event_log cimport CLEARED, REMOVED, STORED
from pagepool.prefix.floors cimport HELD, LINKED, CacheFloors
from pagepool.prefix.node cimport Node, list_clear, list_is_sound, list_push, list_remove
from pagepool.prefix.node_table cimport NodeTable

from pagepool.errors import InvalidBlock, PoolError
from pagepool.prefix.policies import POLICIES

__all__ = ["CachedBlocks"]


@cython.final
@cython.no_gc_clear  # __dealloc__ gives blocks back to the allocator
cdef class CachedBlocks:
    """The blocks that a prefix cache holds a reference to. Internal: the cache checks arguments, this acts."""

    def __cinit__(self, BlockAllocator allocator not None, int32_t block_size, str policy not None, int hash_bits):
        list_clear(&self.held)
        self.allocator = allocator
        self.kept = KeptBlocks(allocator)
        self.mark = CACHED
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
        PyMem_Free(self.path)

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

    cdef int c_reserve_path(self, int64_t n) except -1:
        cdef void *memory
        if n > self.path_room:
            memory = PyMem_Realloc(self.path, n * sizeof(int32_t))
            if memory == NULL:
                raise MemoryError(f"no memory for a path of {n} nodes")
            self.path = <int32_t *>memory
            self.path_room = n
        return 0

    cdef void c_pin(self, int32_t node) noexcept:
        self.table.nodes[node].num_children += 1

    cdef void c_unpin(self, int32_t node) noexcept:
        self.table.nodes[node].num_children -= 1
        self.table.c_collect(node)

    cdef int64_t c_walk(self, int32_t root, const int32_t *tokens, int64_t n, bint cached_only) noexcept nogil:
        """Writes the nodes of the leading blocks to `path`, as far as there are any, or any with a block."""
        cdef Node *nodes = self.table.nodes
        cdef int64_t size = self.table.block_size, i = 0, end
        cdef int32_t node = root
        cdef uint64_t hash
        while i < n:
            end = i + self.table.c_follow(node, tokens + i * size, n - i)
            if end == i:
                node = self.table.c_find(node, tokens + i * size, &hash) - 1
                if node < -1:
                    return i
                end = i + 1
            while i < end:
                node += 1
                if cached_only and nodes[node].block < 0:
                    return i
                self.path[i] = node
                i += 1
        return n

    cdef void c_touch_path(self, int64_t n) noexcept:
        """All nodes in `path`, from the first to the last; those with ids in a row together."""
        cdef Node *nodes = self.table.nodes
        cdef int64_t i = 0, end
        while i < n:
            end = i
            while end < n and self.path[end] == self.path[i] + end - i and not nodes[self.path[end]].held:
                end += 1
            if end > i:
                self.order.c_touch_run(self.path[i], <int32_t>(end - i))
                i = end
            else:
                self.c_touch(self.path[i])
                i += 1

    cdef void c_relink(self, int32_t node) noexcept:
        if self.table.nodes[node].held == HELD:
            self.table.nodes[node].held = LINKED
            list_remove(&self.held, self.table.nodes, node)
        else:
            self.floors.c_take_back(node)
        self.order.c_link(node)

    cdef void c_touch(self, int32_t node) noexcept:
        if self.table.nodes[node].held:
            self.c_relink(node)
        self.order.c_touch(node)

    cdef void c_put(self, int32_t node, int32_t block) noexcept:
        """Gives a node a block whose reference is the cache's."""
        self.table.nodes[node].block = block
        self.owners[block] = node + 1
        self.num_cached += 1
        self.inserted += 1
        self.floors.c_added(self.kept.counts.marks[block])
        if self.log is not None:
            self.log.c_add(STORED, node, block)
        self.order.c_insert(node)

    cdef void c_drop(self, int32_t node) noexcept:
        cdef int32_t block = self.table.nodes[node].block
        self.table.nodes[node].block = -1
        self.owners[block] = 0
        if self.log is not None:
            self.log.c_add(REMOVED, node, block)
        self.num_cached -= 1
        self.floors.c_removed(self.kept.counts.marks[block])
        self.evicted += 1
        self.c_pin(node)  # the policy may forget ghosts, this one among them
        self.order.c_evicted(node)
        self.c_unpin(node)
        self.kept.c_drop(block)

    cdef bint c_discard(self, int32_t block) noexcept:
        """For the policy it is an eviction like any other."""
        cdef int32_t node = self.owners[block] - 1
        if node < 0:
            return False
        if self.table.nodes[node].held:
            self.c_relink(node)
        self.c_drop(node)
        self.evicted -= 1
        self.cleared += 1
        return True

    cdef bint c_in_use(self, int32_t node) noexcept:
        return self.allocator.c_is_shared(self.table.nodes[node].block)

    cdef void c_return_held(self, int32_t most) noexcept:
        """Looks at up to `most` held nodes, the longest held first, and gives the policy those that are free again."""
        cdef Node *nodes = self.table.nodes
        cdef int32_t node
        for _ in range(min(most, self.held.size)):
            node = self.held.head
            list_remove(&self.held, nodes, node)
            if self.c_in_use(node):
                list_push(&self.held, nodes, node)
            else:
                nodes[node].held = LINKED
                self.order.c_link(node)

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
                self.c_drop(node)
                done += 1
        return done

    cdef int64_t c_pass(self, int32_t root, const int32_t *tokens, int64_t n) noexcept:
        """Finds or caches a block after the other; the pin on the last node keeps the path to it alive."""
        cdef int64_t size = self.table.block_size, i, leading = 0
        cdef int32_t node = root, child, block
        cdef uint64_t hash
        self.c_pin(node)
        for i in range(n):
            child = self.table.c_find(node, tokens + i * size, &hash)
            if child < 0:
                child = self.table.c_add(node, tokens + i * size, hash)
            self.c_pin(child)
            self.c_unpin(node)
            node = child
            if self.table.nodes[node].block >= 0:
                self.c_touch(node)
                leading += leading == i
            elif self.kept.c_allocate(CACHED, &block) == PP_OK:
                self.c_put(node, block)
            elif self.order.c_refuses(node):
                self.inserted += 1
                self.evicted += 1
            elif self.c_evict(1, CACHED) == 1 and self.kept.c_allocate(CACHED, &block) == PP_OK:
                self.c_put(node, block)
            else:
                break
        self.c_unpin(node)
        return leading

    cdef int32_t c_last_of(self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n) noexcept:
        cdef size_t row = self.table.block_size
        cdef int32_t node
        if n == 0 or <unsigned int>blocks[n - 1] >= <unsigned int>self.allocator.max_capacity:
            return -1
        node = self.owners[blocks[n - 1]] - 1
        if node < 0 or self.table.nodes[node].root != root:
            return -1
        if memcmp(self.table.tokens + node * row, tokens + (n - 1) * row, row * sizeof(int32_t)) != 0:
            return -1
        return node

    cdef int64_t c_publish(
        self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start
    ) except -1:
        """The second half of `path` takes the new blocks. What is known goes on behind the first `start` blocks."""
        cdef Node *nodes = self.table.nodes
        cdef int64_t size = self.table.block_size, known, i, failed, fresh = 0
        cdef int32_t *taken = self.path + n
        cdef int32_t node = self.c_last_of(root, tokens, blocks, start), last
        cdef pp_status status
        if node >= 0:
            tokens += start * size
            blocks += start
            n -= start
        else:
            start = 0
            node = root
        known = self.c_walk(node, tokens, n, False)
        for i in range(n):
            if i >= known or nodes[self.path[i]].block < 0:
                taken[fresh] = blocks[i]
                fresh += 1
        status = self.kept.c_keep_n(taken, fresh, self.mark, &failed)
        if status != PP_OK:
            for i in range(n):
                if i >= known or nodes[self.path[i]].block < 0:
                    failed -= 1
                    if failed < 0:
                        raise self.refused(start + i, blocks[i], status)
        fresh = 0
        if known:
            node = self.path[known - 1]
        self.c_pin(node)  # the policy may forget ghosts: whatever is on the path stays
        for i in range(known):
            if nodes[self.path[i]].block < 0:
                self.c_put(self.path[i], taken[fresh])
                fresh += 1
        last = node
        for i in range(known, n):
            node = self.table.c_add(node, tokens + i * size, self.table.c_hash(node, tokens + i * size))
            self.c_put(node, taken[fresh])
            fresh += 1
        self.c_unpin(last)
        return fresh

    cdef int64_t keep(
        self, tuple key, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start, int mark, int level,
        uint64_t end
    ) except -1:
        cdef int32_t root
        try:
            self.c_reserve_path(2 * n)
            self.table.reserve(n + 1)
            self.mark = <uint8_t>mark
            self.order.priority = level
            self.order.end = end
            self.order.c_reserve(n)
            root = self.table.root(key)
            self.c_pin(root)
            try:
                return self.c_publish(root, tokens, blocks, n, start)
            finally:
                self.c_unpin(root)
        finally:
            self.mark = CACHED
            self.order.priority = 0
            self.order.end = 0

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

    cdef object refused(self, int64_t i, int32_t block, pp_status status):
        if block < 0 or block >= self.allocator.max_capacity:
            return InvalidBlock(f"block {block} is out of range: there are {self.allocator.max_capacity} blocks")
        if status == PP_INVALID_BLOCK:
            return InvalidBlock(f"block {block} cannot be cached: it is free")
        if status == PP_INVALID_ARGUMENT:
            return InvalidBlock(f"block {block}, given at {i}, is cached already, for other tokens")
        return PoolError(f"block {block} has {INT32_MAX} references, all that a count can hold")
