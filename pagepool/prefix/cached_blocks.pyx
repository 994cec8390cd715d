"""CachedBlocks: prompts are found, and blocks of prompts cached. All of it wants the GIL, but for `c_walk`."""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp

from pagepool.csrc cimport PP_INVALID_ARGUMENT, PP_INVALID_BLOCK, PP_OK, pp_status
from pagepool.prefix.evictable_blocks cimport AT_ONCE, CACHED, EvictableBlocks
from pagepool.prefix.node cimport Node

from pagepool.errors import InvalidBlock, PoolError

__all__ = ["CachedBlocks"]


@cython.final
@cython.no_gc_clear  # __dealloc__ gives blocks back to the allocator
cdef class CachedBlocks(EvictableBlocks):
    """The blocks of a prefix cache, by their tokens. Internal: the cache checks arguments, this acts."""

    def __cinit__(self):
        self.mark = CACHED

    def __dealloc__(self):
        PyMem_Free(self.path)

    cdef int c_reserve_path(self, int64_t n) except -1:
        cdef void *memory
        if n > self.path_room:
            memory = PyMem_Realloc(self.path, n * sizeof(int32_t))
            if memory == NULL:
                raise MemoryError(f"no memory for a path of {n} nodes")
            self.path = <int32_t *>memory
            self.path_room = n
        return 0

    cdef int64_t c_walk(self, int32_t root, const int32_t *tokens, int64_t n, bint cached_only) noexcept nogil:
        """Writes the nodes of the leading blocks to `path`, as far as there are any, or any with a block."""
        cdef Node *nodes = self.table.nodes
        cdef int64_t size = self.table.block_size, i = 0, end
        cdef int32_t node = root
        while i < n:
            end = i + self.table.c_follow(node, tokens + i * size, n - i, cached_only)
            if end == i:
                node = self.table.c_find(node, tokens + i * size) - 1
                if node < -1 or (cached_only and nodes[node + 1].block < 0):
                    return i
                end = i + 1
            while i < end:
                node += 1
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

    cdef void c_touch(self, int32_t node) noexcept:
        if self.table.nodes[node].held:
            self.c_relink(node)
        self.order.c_touch(node)

    cdef int64_t c_pass(self, int32_t root, const int32_t *tokens, int64_t n) noexcept:
        """Finds or caches a block after the other; the pin on the last node keeps the path to it alive."""
        cdef int64_t size = self.table.block_size, i, leading = 0
        cdef int32_t node = root, child, block
        self.c_pin(node)
        for i in range(n):
            child = self.table.c_find(node, tokens + i * size)
            if child < 0:
                self.table.c_add_run(node, tokens + i * size, 1, &child)
            self.c_pin(child)
            self.c_unpin(node)
            node = child
            if self.table.nodes[node].block >= 0:
                self.c_touch(node)
                leading += leading == i
            elif self.kept.c_allocate(CACHED, &block) == PP_OK:
                self.c_put_run(node, 1, &block)
            elif self.order.c_refuses(node):
                self.inserted += 1
                self.evicted += 1
            elif self.c_evict(1, CACHED) == 1 and self.kept.c_allocate(CACHED, &block) == PP_OK:
                self.c_put_run(node, 1, &block)
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

    cdef void c_add(self, int32_t node, const int32_t *tokens, int64_t n, const int32_t *blocks) noexcept:
        cdef int64_t size = self.table.block_size, i = 0
        cdef int32_t first, count
        while i < n:
            count = self.table.c_add_run(node, tokens + i * size, min(n - i, <int64_t>AT_ONCE), &first)
            self.c_put_run(first, count, blocks + i)
            node = first + count - 1
            i += count

    cdef bint c_gives_way(self, int32_t node, int32_t block) noexcept:
        """Whether the node has a block that nobody uses, and the other is somebody's and not cached. A caller that has
        given back the first of its blocks may give anything for them."""
        cdef int32_t cached = self.table.nodes[node].block
        if cached < 0 or cached == block or self.stays or self.c_in_use(node):
            return False
        if <unsigned int>block >= <unsigned int>self.allocator.max_capacity or self.owners[block]:
            return False
        return self.allocator.c_ref_count(block) > 0

    cdef inline bint c_takes(self, int64_t i, int64_t known) noexcept:
        """Whether block i gets a place: behind the `known` nodes, at one without a block, or where one gives way."""
        return i >= known or self.path[i] < 0 or self.table.nodes[self.path[i]].block < 0

    cdef int64_t c_publish(
        self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start
    ) except -1:
        """The second half of `path` takes the new blocks. What is known goes on behind the first `start` blocks. In the
        first half -1 - node is a node whose block gives way."""
        cdef Node *nodes = self.table.nodes
        cdef int64_t size = self.table.block_size, known, i, end, failed, fresh = 0
        cdef int32_t *taken = self.path + n
        cdef int32_t node = self.c_last_of(root, tokens, blocks, start)
        cdef pp_status status
        if node >= 0:
            tokens += start * size
            blocks += start
            n -= start
        else:
            start = 0
            node = root
        known = self.c_walk(node, tokens, n, False)
        if known:
            node = self.path[known - 1]
        for i in range(n):
            if i < known and self.c_gives_way(self.path[i], blocks[i]):
                self.path[i] = -1 - self.path[i]
            if self.c_takes(i, known):
                taken[fresh] = blocks[i]
                fresh += 1
        status = self.kept.c_keep_n(taken, fresh, self.mark, &failed)
        if status != PP_OK:
            for i in range(n):
                if self.c_takes(i, known):
                    failed -= 1
                    if failed < 0:
                        raise self.refused(start + i, blocks[i], status)
        fresh = i = 0
        self.c_pin(node)  # the policy may forget ghosts: whatever is on the path stays
        while i < known:
            if self.path[i] < 0:
                self.c_give_place(-1 - self.path[i], taken[fresh])
                fresh += 1
                i += 1
                continue
            end = i
            while end < known and self.path[end] == self.path[i] + end - i and nodes[self.path[end]].block < 0:
                end += 1
            if end > i:
                self.c_put_run(self.path[i], <int32_t>(end - i), taken + fresh)
                fresh += end - i
                i = end
            else:
                i += 1
        self.c_add(node, tokens + known * size, n - known, taken + fresh)
        self.c_unpin(node)
        return fresh + n - known

    cdef int64_t keep(
        self, tuple key, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start, int mark, int level,
        uint64_t end, bint stays
    ) except -1:
        cdef int32_t root
        try:
            self.c_reserve_path(2 * n)
            self.table.reserve(n + 1)
            self.mark = <uint8_t>mark
            self.stays = stays
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
            self.stays = False
            self.order.priority = 0
            self.order.end = 0

    cdef object refused(self, int64_t i, int32_t block, pp_status status):
        if block < 0 or block >= self.allocator.max_capacity:
            return InvalidBlock(f"block {block} is out of range: there are {self.allocator.max_capacity} blocks")
        if status == PP_INVALID_BLOCK:
            return InvalidBlock(f"block {block} cannot be cached: it is free")
        if status == PP_INVALID_ARGUMENT:
            return InvalidBlock(f"block {block}, given at {i}, is cached already, for other tokens")
        return PoolError(f"block {block} has {INT32_MAX} references, all that a count can hold")
