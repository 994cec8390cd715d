cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.block_refs cimport CachedRefs
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport EventLog
from pagepool.prefix.policies cimport LruPolicy
from pagepool.prefix.radix_tree cimport NodeList, NodeTable
from pagepool.prefix.stored_pages cimport PageQueue


# Knows no tokens: a node is a block of a prefix, and its parent the block before it.
cdef class BlockOrder:
    #   node_of[block] = node + 1, and 0 for a block that is not cached; nodes[node_of[block] - 1].block = block
    #   num_cached = nodes with a block = those in the policy's lists + those in `in_use`
    # node.place names the list that has the node.
    cdef NodeTable tree
    cdef LruPolicy policy
    cdef PageBuffer node_memory
    cdef int32_t *node_of
    cdef NodeList in_use
    cdef int32_t num_cached

    # Whether a sequence holds the node's block.
    cdef bint c_in_use(self, int32_t node) noexcept
    # Whether a cached block is held by no sequence.
    cdef bint c_has_idle(self) noexcept

    # Adds a block at a node that has none.
    @cython.final
    cdef void c_enter(self, int32_t node, int32_t block) noexcept

    # Removes the block from a node, and returns the block.
    @cython.final
    cdef int32_t c_leave(self, int32_t node) noexcept

    # Marks the node as found by a look-up.
    @cython.final
    cdef void c_touch(self, int32_t node) noexcept

    # Move a node from the policy's lists to `in_use`, and back.
    @cython.final
    cdef void c_set_aside(self, int32_t node) noexcept

    @cython.final
    cdef void c_bring_back(self, int32_t node) noexcept

    # Checks up to `most` nodes of `in_use`, oldest first. Unused nodes return to the policy.
    @cython.final
    cdef void c_return_unused(self, int32_t most) noexcept

    # Returns a node to evict, whose block no sequence holds, or -1. all_seen: all of `in_use` was checked.
    @cython.final
    cdef int32_t c_victim(self, bint *all_seen) noexcept

    @cython.final
    cdef void c_clear(self) noexcept
    cdef str audit_order(self)


cdef class CachedBlocks(BlockOrder):
    # The cache holds one reference to each cached block:
    #   refs has the cached blocks
    #   inserted - evicted - cleared = num_cached
    cdef BlockAllocator allocator
    cdef CachedRefs refs
    cdef EventLog log  # or None
    cdef PageQueue queue  # of the store, or None
    cdef int number  # of the secret of the store, in the tree
    cdef long long inserted
    cdef long long evicted
    cdef long long cleared
    cdef long long epoch  # see `PrefixCache.epoch`

    cdef int reset(self) except -1
    # The ids of all cached blocks.
    cdef list list_blocks(self)
    # Caches a block at a node. The cache must hold its reference to the block already.
    cdef void c_put(self, int32_t node, int32_t block) noexcept
    # Notes an event of a node.
    cdef void c_log(self, int kind, int32_t node, int32_t block) noexcept
    # Offers the page of a node to the store. False when the queue is full.
    cdef bint c_offer(self, int32_t node) noexcept
    # Offers the n blocks of a prefix that was found, and notes the use of the prefix.
    cdef void c_found(self, const int32_t *path, int64_t n) noexcept
    # The node of `block`, the last one of n blocks of a sequence, if it is cached below `root` for its tokens; else -1.
    cdef int32_t c_at(self, int32_t root, const int32_t *tokens, int32_t block, int64_t n) noexcept
    # Sets and returns `tree.now`, in tenths of a second. Call it before blocks are removed or refused.
    cdef int32_t c_read_clock(self) noexcept
    # Whether `block` replaces the block of the node: true if the new block is in use and not cached, and the old block
    # is idle. `block` may have any count: callers may have freed the first blocks of a sequence.
    cdef bint c_gives_way(self, int32_t node, int32_t block) noexcept
    # The names in the store of the cached blocks among n blocks.
    cdef list names_of(self, const int32_t *blocks, int64_t n)
    # Offers every cached block to the store, parents first. False when the queue is full.
    cdef bint offer_all(self) except -1
    # Replaces the node's block, which no sequence uses, by another block of the same tokens. The cache must already
    # hold its reference to the new block.
    cdef void c_give_place(self, int32_t node, int32_t block) noexcept
    # Removes the block from a node in a list of the policy, and returns the block. The caller drops its reference.
    cdef int32_t c_drop(self, int32_t node) noexcept
    # Drops a block from any list. Returns false if it is not cached.
    cdef bint c_discard(self, int32_t block) noexcept
    # Caches n blocks below `root`, of which the first `start` are cached already; returns how many are new. Takes all
    # references, or none, before it changes anything. `path` has room for 2 * n nodes, the tree for n + 1 more.
    cdef int64_t publish(
        self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start, int32_t *path
    ) except -1
    cdef bint is_block(self, int32_t block) noexcept
    cdef object refused(self, int64_t i, int32_t block, pp_status status)
    # Evicts up to n blocks. Returns the number of evicted blocks.
    cdef int64_t c_evict(self, int64_t n) noexcept
    # `PrefixCache.touch`. The tree must have room for n + 1 nodes.
    cdef int64_t c_pass(self, int32_t root, const int32_t *tokens, int64_t n) noexcept
    cdef str audit(self)


# An order with its own counts of holders.
cdef class HeldOrder(BlockOrder):
    #   num_held = blocks whose entry of `holds` is not 0; a block that is not cached has 0
    cdef PageBuffer memory
    cdef int32_t *holds
    cdef int32_t num_held

    cdef void c_hold(self, int32_t block) noexcept
    cdef void c_release(self, int32_t block) noexcept


cdef class EvictionPolicy:
    #   num_cached + num_spare = num_used <= capacity: blocks are numbers here, those in use were used at least once
    #   keys[block] = the key of a cached block, and None for any other
    #   known[key] = (serial << 32) + node for each key of a live node; entries of other nodes are removed later
    # The only token of a node is its serial number: no other node of the same number had it.
    cdef HeldOrder order
    cdef readonly int64_t capacity
    cdef readonly str policy
    cdef dict known
    cdef list keys
    cdef PageBuffer memory
    cdef int32_t *spare
    cdef int32_t num_spare
    cdef int32_t num_used
    cdef uint32_t serial

    # The live node of a key, or -1.
    cdef int32_t node_of(self, bytes key) except -2
    # The block of a cached key; raises KeyError.
    cdef int32_t block_of(self, bytes key) except -1
    cdef void c_drop(self, int32_t node) noexcept
    cdef int start(self) except -1
    cdef int forget_dead(self) except -1
