from libc.stdint cimport int32_t, int64_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.block_refs cimport CachedRefs
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport EventLog
from pagepool.prefix.policies cimport LruPolicy
from pagepool.prefix.radix_tree cimport NodeList, NodeTable
from pagepool.prefix.stored_pages cimport PageQueue


cdef class CachedBlocks:
    # The cache holds one reference to each cached block:
    #   node_of[block] = node + 1, and 0 for a block that is not cached; nodes[node_of[block] - 1].block = block
    #   refs has the cached blocks
    #   num_cached = nodes with a block = those in the policy's lists + those in `in_use`
    #   inserted - evicted - cleared = num_cached
    # node.place names the list that has the node.
    cdef BlockAllocator allocator
    cdef CachedRefs refs
    cdef NodeTable tree
    cdef LruPolicy policy
    cdef EventLog log  # or None
    cdef PageQueue queue  # of the store, or None
    cdef PageBuffer node_memory
    cdef int32_t *node_of
    cdef NodeList in_use
    cdef int32_t num_cached
    cdef long long inserted
    cdef long long evicted
    cdef long long cleared
    cdef long long epoch  # see `PrefixCache.epoch`

    cdef int reset(self) except -1
    # The ids of all cached blocks.
    cdef list list_blocks(self)
    # Whether another reference to the node's block exists.
    cdef bint c_in_use(self, int32_t node) noexcept
    # Caches a block at a node. The cache must hold its reference to the block already.
    cdef void c_put(self, int32_t node, int32_t block) noexcept
    # Marks the node as found by a look-up.
    cdef void c_touch(self, int32_t node) noexcept
    # Replaces the node's block, which no sequence uses, by another block of the same tokens. The cache must already
    # hold its reference to the new block.
    cdef void c_give_place(self, int32_t node, int32_t block) noexcept
    # Removes the block from a node in a list of the policy, and returns the block. The caller drops its reference.
    cdef int32_t c_drop(self, int32_t node) noexcept
    # Drops a block from any list. Returns false if it is not cached.
    cdef bint c_discard(self, int32_t block) noexcept
    # Move a node from the policy's lists to `in_use`, and back.
    cdef void c_set_aside(self, int32_t node) noexcept
    cdef void c_bring_back(self, int32_t node) noexcept
    # Checks up to `most` nodes of `in_use`, oldest first. Unused nodes return to the policy.
    cdef void c_return_unused(self, int32_t most) noexcept
    # Returns the next candidate for eviction, or -1. all_seen: this call of c_evict has already checked all of
    # `in_use`.
    cdef int32_t c_victim(self, bint *all_seen) noexcept
    # Evicts up to n blocks. Returns the number of evicted blocks.
    cdef int64_t c_evict(self, int64_t n) noexcept
    # `PrefixCache.touch`. The tree must have room for n + 1 nodes.
    cdef int64_t c_pass(self, int32_t root, const int32_t *tokens, int64_t n) noexcept
    cdef str audit(self)
