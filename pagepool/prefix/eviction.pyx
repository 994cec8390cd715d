"""Eviction: the blocks of a prefix cache, and the order in which they are evicted.

A cached block is either in use (another reference to it exists) or evictable. The policy's lists have both kinds: a
block becomes evictable when its last user frees it, on any thread and without a call of the cache. If the policy
chooses a node with a block in use, the node moves to the list `in_use`. Each eviction checks two nodes of that list and
returns them to the policy if they are unused. If the policy has no node left although a block is evictable, a call
checks the whole list once.
"""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp

from pagepool.csrc cimport PP_INVALID_ARGUMENT, PP_INVALID_BLOCK, PP_OK, pp_status
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
    pause_collector,
    refuse_negative,
    resume_collector,
)

from pagepool._arguments import integer
from pagepool.errors import InvalidBlock, PoolError, PoolExhausted, refuse_copy
from pagepool.prefix.gittins import GittinsPolicy
from pagepool.prefix.policies import LruPolicy

__all__ = ["POLICIES", "EvictionPolicy"]

POLICIES = {
    "lru": LruPolicy,
    "gittins": GittinsPolicy,
}

cdef extern from *:
    """
    #include <time.h>
    /* Tenths of a second since the host has booted, at a resolution of some milliseconds: 5 ns. */
    static inline int32_t pp_tenths(void) {
        struct timespec time;
        clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
        return (int32_t)(((uint64_t)time.tv_sec * 10 + (uint64_t)time.tv_nsec / 100000000) & 0x3fffffff);
    }
    """
    int32_t tenths "pp_tenths"() noexcept nogil

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
        self.tree.nodes[node].block = -2 - self.tree.now if self.tree.now >= 0 else -1
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
        self.c_read_clock()
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

    cdef int32_t c_at(self, int32_t root, const int32_t *tokens, int32_t block, int64_t n) noexcept:
        cdef size_t row = self.tree.block_size
        cdef int32_t node
        if n == 0 or <unsigned int>block >= <unsigned int>self.allocator.max_capacity:
            return -1
        node = self.node_of[block] - 1
        if node < 0 or self.tree.nodes[node].root != root:
            return -1
        if memcmp(self.tree.tokens + node * row, tokens + (n - 1) * row, row * sizeof(int32_t)) != 0:
            return -1
        return node

    cdef int32_t c_read_clock(self) noexcept:
        self.tree.now = tenths()
        return self.tree.now

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

    cdef int64_t publish(
        self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start, int32_t *path
    ) except -1:
        cdef NodeTable tree = self.tree
        cdef int32_t *taken = path + n  # the ids that the cache takes from `blocks`, -1 for the rest
        cdef int64_t known, i, failed = 0, fresh = 0
        cdef int32_t node = self.c_at(root, tokens, blocks[start - 1] if start else -1, start), last
        cdef pp_status status
        if node < 0:
            start = 0
            node = root
        known = tree.c_walk(node, tokens + start * tree.block_size, n - start, False, path)
        refuse_negative(tokens, (start + known) * tree.block_size, n * tree.block_size)
        tokens += start * tree.block_size
        blocks += start
        n -= start
        for i in range(n):
            taken[i] = blocks[i]
            if i < known and tree.nodes[path[i]].block >= 0:
                if not self.is_block(blocks[i]) or not self.c_gives_way(path[i], blocks[i]):
                    taken[i] = -1
            elif not self.is_block(blocks[i]):
                raise self.refused(start + i, blocks[i], PP_INVALID_BLOCK)
        status = self.refs.c_add_n(taken, n, &failed)
        if status != PP_OK:
            raise self.refused(start + failed, blocks[failed], status)
        last = path[known - 1] if known else node
        tree.c_pin(last)  # the policy may forget ghosts: keep every node on the path
        for i in range(n):
            node = path[i] if i < known else tree.c_add(node, tokens + i * tree.block_size)
            if taken[i] >= 0:
                fresh += 1
                if tree.nodes[node].block >= 0:
                    self.c_give_place(node, taken[i])
                else:
                    self.c_put(node, taken[i])
        tree.c_unpin(last)
        return fresh

    cdef bint is_block(self, int32_t block) noexcept:
        return 0 <= block < self.allocator.max_capacity

    cdef object refused(self, int64_t i, int32_t block, pp_status status):
        if not self.is_block(block):
            return InvalidBlock(f"block {block} is out of range: there are {self.allocator.max_capacity} blocks")
        if status == PP_INVALID_BLOCK:
            return InvalidBlock(f"block {block} cannot be cached: it is free")
        if status == PP_INVALID_ARGUMENT:
            return InvalidBlock(f"block {block}, given at {i}, is cached already, for other tokens")
        return PoolError(f"block {block} has {INT32_MAX} references, all that a count can hold")

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
                tree.nodes[node].block = -2 - tree.now
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


@cython.final
@cython.auto_pickle(False)
cdef class HeldOrder(BlockOrder):
    """An order with its own counts of holders. Internal."""

    def __cinit__(self, NodeTable tree, int64_t num_blocks, str policy):
        self.memory = PageBuffer(num_blocks, "i")
        self.holds = <int32_t *>self.memory.base

    cdef bint c_in_use(self, int32_t node) noexcept:
        return self.holds[self.tree.nodes[node].block] != 0

    cdef bint c_has_idle(self) noexcept:
        return self.num_cached > self.num_held

    cdef void c_hold(self, int32_t block) noexcept:
        self.num_held += self.holds[block] == 0
        self.holds[block] += 1

    cdef void c_release(self, int32_t block) noexcept:
        self.holds[block] -= 1
        self.num_held -= self.holds[block] == 0


@cython.final
@cython.auto_pickle(False)
cdef class EvictionPolicy:
    """EvictionPolicy(policy, capacity)\n--\n
    The eviction order of `PrefixCache` for a cache that knows its blocks by opaque keys.

    It has no memory of its own to give out: the cache calls `insert` for a block that it begins to keep, `touch` for
    one that a request has found, and `evict` when it needs room. "gittins" learns from the order of the calls. So pass
    all blocks of a request without others in between, the first block of the prompt first. The policy also remembers
    keys that were evicted, up to four times `capacity`. Any number of threads may call it.

    Parameters
    ----------
    policy : {"gittins", "lru"}
        As in `PrefixCache`.
    capacity : int
        The highest number of cached keys.

    Attributes
    ----------
    policy : str
    capacity : int

    Raises
    ------
    ValueError
        Another policy, or a capacity that is not from 1 to 2**31 - 1.

    Examples
    --------
    >>> policy = EvictionPolicy("lru", 3)
    >>> policy.insert(b"a")
    >>> policy.insert(b"ab", b"a")
    >>> policy.insert(b"x")
    >>> policy.touch(b"a")
    >>> policy.evict(1), policy.evict(1, protected={b"x"}), policy.evict(2)
    ([b'ab'], [b'a'], None)
    >>> len(policy), b"x" in policy
    (1, True)
    """

    def __cinit__(self, str policy not None, capacity):
        self.capacity = integer("capacity", capacity, 1, INT32_MAX)
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.policy = policy
        self.memory = PageBuffer(self.capacity, "i")
        self.spare = <int32_t *>self.memory.base
        self.order = HeldOrder(NodeTable(1), self.capacity, policy)
        self.start()

    def __reduce__(self):
        refuse_copy(self)

    def __len__(self):
        return self.order.num_cached

    def __contains__(self, bytes key not None):
        with cython.critical_section(self):
            node = self.node_of(key)
            return node >= 0 and self.order.tree.nodes[node].block >= 0

    def __repr__(self):
        return f"<{type(self).__name__} {self.policy}: {len(self)} of {self.capacity} keys>"

    def insert(self, bytes key not None, bytes parent=None):
        """Note that the block of `key` is cached now. This is its first use, or one more use of an evicted key.

        Parameters
        ----------
        key : bytes
        parent : bytes or None
            The key of the block before it in the prompt, None for the first block. "gittins" evicts a block after the
            cached blocks behind it. A parent that the policy does not remember is as good as None.

        Raises
        ------
        ValueError
            `key` is cached already, or its own parent.
        PoolExhausted
            `capacity` keys are cached.
        """
        cdef HeldOrder order = self.order
        cdef NodeTable tree = order.tree
        cdef int32_t node, block, above = -1
        cdef int paused
        if key == parent:
            raise ValueError(f"the key {key!r} is its own parent")
        with cython.critical_section(self):
            node = self.node_of(key)
            if node >= 0 and tree.nodes[node].block >= 0:
                raise ValueError(f"the key {key!r} is cached already")
            if order.num_cached == self.capacity:
                raise PoolExhausted(f"all {self.capacity} keys are cached: evict one before the next is inserted")
            paused = pause_collector()
            try:
                self.forget_dead()
                tree.reserve(2)
                if parent is not None:
                    above = self.node_of(parent)
                if node < 0 or (above >= 0 and tree.nodes[node].parent != above):
                    if above < 0:
                        above = tree.root((b"", b""))
                    self.serial += 1
                    node = tree.c_add(above, <const int32_t *>&self.serial)
                    try:
                        self.known[key] = (<uint64_t>self.serial << 32) + <uint32_t>node
                    except BaseException:
                        tree.c_collect(node)
                        raise
                if self.num_spare:
                    self.num_spare -= 1
                    block = self.spare[self.num_spare]
                else:
                    block = self.num_used
                    self.num_used += 1
                self.keys[block] = key
                order.c_enter(node, block)
            finally:
                resume_collector(paused)

    def touch(self, bytes key not None):
        """Note a use of a cached key. Raises `KeyError` if it is not cached."""
        with cython.critical_section(self):
            self.order.c_touch(self.order.node_of[self.block_of(key)] - 1)

    def hold(self, bytes key not None):
        """Keep a cached key from being evicted, until `release` was called as often. Raises `KeyError`."""
        with cython.critical_section(self):
            block = self.block_of(key)
            if self.order.holds[block] == INT32_MAX:
                raise ValueError(f"the key {key!r} is held {INT32_MAX} times")
            self.order.c_hold(block)

    def release(self, bytes key not None):
        """Take back one call of `hold`. Raises `KeyError`, or `ValueError` if the key is not held."""
        with cython.critical_section(self):
            block = self.block_of(key)
            if self.order.holds[block] == 0:
                raise ValueError(f"the key {key!r} is not held")
            self.order.c_release(block)

    def remove(self, bytes key not None):
        """Note that a block is no longer cached, held or not, for a reason of its cache. Raises `KeyError`."""
        with cython.critical_section(self):
            self.c_drop(self.order.node_of[self.block_of(key)] - 1)

    def evict(self, n, protected=()):
        """Choose `n` cached keys, which are not cached from then on: exactly `n`, or none.

        Parameters
        ----------
        n : int
            At least 0.
        protected : iterable of bytes
            Keys to leave alone, cached or not, in addition to those that are held.

        Returns
        -------
        list of bytes, or None
            The keys in the order in which they were chosen. None, and nothing has changed, if there are fewer than `n`.
        """
        cdef HeldOrder order = self.order
        cdef Py_ssize_t count = integer("n", n, 0), i
        cdef int32_t node
        cdef bint all_seen = False
        cdef int paused
        named = list(protected)
        with cython.critical_section(self):
            paused = pause_collector()
            try:
                if count > order.num_cached:
                    return None
                chosen, kept = [None] * count, []
                for key in named:
                    node = self.node_of(key)
                    if node >= 0 and order.tree.nodes[node].block >= 0:
                        kept.append(order.tree.nodes[node].block)
                for i in range(len(kept)):
                    order.c_hold(kept[i])
                if count > order.num_cached - order.num_held:
                    chosen = None
                    count = 0
                for i in range(count):
                    node = order.c_victim(&all_seen)
                    chosen[i] = self.keys[order.tree.nodes[node].block]
                    self.c_drop(node)
                for i in range(len(kept)):
                    order.c_release(kept[i])
                return chosen
            finally:
                resume_collector(paused)

    def clear(self):
        """Forget all keys, cached, held or evicted, and all that was learnt."""
        with cython.critical_section(self):
            self.start()

    def check(self):
        """Audit the order and the keys. Raises `PoolError` with the first broken invariant. O(capacity)."""
        cdef HeldOrder order = self.order
        cdef int32_t block, held = 0, cached = 0
        with cython.critical_section(self):
            broken = order.audit_order()
            for block in range(self.num_used):
                held += order.holds[block] != 0
                if self.keys[block] is not None:
                    cached += 1
                    if self.node_of(self.keys[block]) != order.node_of[block] - 1:
                        broken = broken or f"the key of block {block} leads to another node"
                elif order.node_of[block] or order.holds[block]:
                    broken = broken or f"block {block} is cached or held, and has no key"
            if held != order.num_held or cached != order.num_cached or cached + self.num_spare != self.num_used:
                broken = broken or (
                    f"{cached} keys, {held} of them held, and {self.num_spare} spare blocks do not fit "
                    f"{order.num_cached}, {order.num_held} and {self.num_used} blocks"
                )
        if broken is not None:
            raise PoolError(f"broken invariant: {broken}")

    cdef int32_t node_of(self, bytes key) except -2:
        cdef NodeTable tree = self.order.tree
        cdef object found = self.known.get(key)
        cdef uint64_t entry
        cdef int32_t node
        if found is None:
            return -1
        entry = found
        node = <int32_t>(entry & INT32_MAX)
        if node < tree.num_made and tree.nodes[node].alive and <uint32_t>tree.tokens[node] == <uint32_t>(entry >> 32):
            return node
        return -1

    cdef int32_t block_of(self, bytes key) except -1:
        cdef int32_t node = self.node_of(key)
        if node < 0 or self.order.tree.nodes[node].block < 0:
            raise KeyError(key)
        return self.order.tree.nodes[node].block

    cdef void c_drop(self, int32_t node) noexcept:
        cdef int32_t block = self.order.c_leave(node)
        self.order.num_held -= self.order.holds[block] != 0
        self.order.holds[block] = 0
        self.keys[block] = None
        self.spare[self.num_spare] = block
        self.num_spare += 1

    cdef int start(self) except -1:
        cdef HeldOrder order = self.order
        keys, known = [None] * self.capacity, {}
        for block in range(self.num_used):
            order.node_of[block] = order.holds[block] = 0
        order.num_held = self.num_spare = self.num_used = 0
        order.c_clear()
        self.keys, self.known = keys, known
        return 0

    cdef int forget_dead(self) except -1:
        """O(1) for each key, because the table of keys halves at least."""
        if len(self.known) > 2 * self.order.tree.num_alive + 64:
            self.known = {key: entry for key, entry in self.known.items() if self.node_of(key) >= 0}
        return 0
