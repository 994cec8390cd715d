from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.block_refs cimport CachedRefs
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport EventLog
from pagepool.prefix.policies cimport EvictionPolicy
from pagepool.prefix.radix_tree cimport NodeList, NodeTable


cdef enum:
    CACHED = 1  # the mark of a cached block of group 0; that of group g is g + 1


cdef class CachedBlocks:
    # The cache holds one reference to each cached block:
    #   owners[block] = node + 1, and 0 for a block that is not cached; nodes[owners[block] - 1].block = block
    #   refs has the cached blocks, each with the mark of its group
    #   num_cached = nodes with a block = those in the policy's lists + those in `in_use` + those in `reserved`
    #   inserted - evicted - cleared = num_cached
    # Of each group, by its mark:
    #   cached[mark] = the cached blocks with that mark
    #   reserved[mark]: nodes whose turn came while cached[mark] <= least[mark], the first first; num_reserved in all
    # node.place says where a node is; top is the largest mark that was used.
    cdef BlockAllocator allocator
    cdef CachedRefs refs
    cdef NodeTable table
    cdef EvictionPolicy order
    cdef EventLog log  # or None
    cdef PageBuffer owners_memory
    cdef int32_t *owners
    cdef NodeList in_use
    cdef NodeList reserved[256]
    cdef int64_t num_reserved
    cdef int64_t cached[256]
    cdef int64_t least[256]  # what each group has reserved
    cdef int top
    cdef int32_t num_cached
    cdef long long inserted
    cdef long long evicted
    cdef long long cleared
    cdef long long forgotten  # those of `cleared` that did not give their place to another

    cdef int reset(self) except -1
    # The ids of all cached blocks.
    cdef list list_blocks(self)
    cdef uint8_t c_mark_of(self, int32_t node) noexcept
    # Whether somebody else has a reference to the node's block.
    cdef bint c_in_use(self, int32_t node) noexcept
    # The node gets a block, whose reference, and mark, the cache has.
    cdef void c_put(self, int32_t node, int32_t block) noexcept
    # The node was found by a look-up.
    cdef void c_touch(self, int32_t node) noexcept
    # The node's block, which nobody uses, gives way to another for the same tokens, whose reference is the cache's.
    cdef void c_give_place(self, int32_t node, int32_t block) noexcept
    # The node, in a list of the policy, loses its block: returns it, and the reference is the caller's to drop.
    cdef int32_t c_drop(self, int32_t node) noexcept
    # Drops a block wherever it is; false when it is not cached.
    cdef bint c_discard(self, int32_t block) noexcept
    # Out of the lists of the policy, and back.
    cdef void c_set_aside(self, int32_t node, uint8_t place) noexcept
    cdef void c_bring_back(self, int32_t node) noexcept
    # Looks at up to `most` nodes of `in_use`, the longest there first; those that nobody uses go back to the policy.
    cdef void c_return_unused(self, int32_t most) noexcept
    # The first reserved node of a group that has more than it reserved, or -1.
    cdef int32_t c_surplus(self) noexcept
    # The node to be looked at next, or -1. `own` is the mark of the group that needs room.
    # all_seen: whether this call has looked at all nodes that were set aside as in use.
    cdef int32_t c_victim(self, uint8_t own, bint *all_seen) noexcept
    # Up to n blocks; returns how many.
    cdef int64_t c_evict(self, int64_t n, uint8_t own) noexcept
    # Cached blocks of a group that nobody else uses, and that are kept from all other groups; those of all groups that
    # are kept from `own`.
    cdef int64_t c_protected(self, uint8_t mark) noexcept
    cdef int64_t c_protected_from(self, uint8_t own) noexcept
    cdef str audit(self)


cdef int mark_of(group) except -1
