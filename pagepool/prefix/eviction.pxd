from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.kept cimport KeptBlocks
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport EventLog
from pagepool.prefix.policies cimport EvictionPolicy
from pagepool.prefix.radix_tree cimport NodeList, NodeTable


# Where a cached node is, as node.held tells it: in the lists of the policy, or in one of those beside.
cdef enum:
    LINKED
    HELD
    SPARED
    DUE


cdef class CacheFloors:
    # For each group, by its mark, which is group + 1:
    #   cached[mark] = the cached blocks with that mark
    #   aside[mark]: its nodes that the policy gave while cached[mark] <= least[mark], the first first
    #   due: nodes that were spared, until their group had more; they go before all others
    # Nodes of both have held == SPARED or DUE, and are in no list of the policy. top: the largest mark that was used.
    cdef KeptBlocks kept
    cdef NodeTable table
    cdef int64_t cached_blocks[256]
    cdef int64_t least[256]
    cdef NodeList aside[256]
    cdef NodeList due
    cdef int top

    cdef int mark_of(self, group) except -1
    # A block has a node from now on. One less: cached_blocks[mark] -= 1, once its node is LINKED.
    cdef void c_added(self, uint8_t mark) noexcept
    # Whether its group has no block to give but for requests of the group `own`, a mark.
    cdef bint c_protects(self, int32_t node, uint8_t own) noexcept
    # The next node that is due, or -1; it stays.
    cdef int32_t c_next_due(self) noexcept
    # When the policy has none: the first node that was spared and need not be, or -1; it stays.
    cdef int32_t c_last_resort(self, uint8_t own) noexcept
    # A node that is in no list is spared; one that is SPARED or DUE is in no list from now on.
    cdef void c_spare(self, int32_t node) noexcept
    cdef void c_take_back(self, int32_t node) noexcept
    # Idle blocks of all groups; those of one that are spared when others need room; all that are, when `own` needs it.
    cdef int64_t c_idle(self) noexcept
    cdef int64_t c_spared(self, uint8_t mark) noexcept
    cdef int64_t c_protected(self, uint8_t own) noexcept
    cdef int64_t c_num_aside(self) noexcept
    cdef void c_clear(self) noexcept
    cdef str audit(self)


cdef enum:
    CACHED = 1  # the mark of a cached block of group 0; that of group g is g + 1
    AT_ONCE = 128  # nodes that are walked over several times, so that they stay in the first cache: 8 KiB


cdef class EvictableBlocks:
    # The cache holds one reference to each cached block:
    #   owners[block] = node + 1, and 0 for a block that is not cached; nodes[owners[block] - 1].block = block
    #   kept has the cached blocks, each with the mark of its group
    #   num_cached = nodes with a block = nodes with a block in the policy's lists + nodes in `held` + those in `floors`
    #   inserted - evicted - cleared = num_cached
    cdef BlockAllocator allocator
    cdef KeptBlocks kept
    cdef CacheFloors floors
    cdef NodeTable table
    cdef EvictionPolicy order
    cdef PageBuffer owners_memory
    cdef int32_t *owners
    cdef NodeList held  # nodes whose blocks were in use when their turn came
    cdef EventLog log  # or None
    cdef int32_t num_cached
    cdef long long inserted
    cdef long long evicted
    cdef long long cleared
    cdef long long forgotten  # those of `cleared` that did not give their place to another

    cdef int reset(self) except -1
    # The ids of all cached blocks.
    cdef list list_blocks(self)
    cdef void c_pin(self, int32_t node) noexcept
    cdef void c_unpin(self, int32_t node) noexcept
    # Nodes first, first + 1, ..., each the parent of the next, get blocks whose references are the cache's.
    cdef void c_put_run(self, int32_t first, int32_t n, const int32_t *blocks) noexcept
    # The node's block, which nobody uses, gives way to another for the same tokens, whose reference is the cache's.
    cdef void c_give_place(self, int32_t node, int32_t block) noexcept
    # Drops the node, in a list of the policy, and those that go after it as long as nothing has to be asked, AT_ONCE
    # and `most` at most; returns how many.
    cdef int32_t c_drop_run(self, int32_t node, int64_t most, uint8_t own) noexcept
    # Drops the cache's reference to a block wherever it is; false when it is not cached.
    cdef bint c_discard(self, int32_t block) noexcept
    cdef bint c_in_use(self, int32_t node) noexcept
    # Whether one of the `most` longest held is free again; if none is, all of these were looked at.
    cdef bint c_held_returns(self, int32_t most) noexcept
    # How many came back to the policy.
    cdef int32_t c_return_held(self, int32_t most) noexcept
    cdef int32_t c_victim(self, uint8_t own) noexcept
    # Out of the list beside the policy's that it is in, and back to the policy.
    cdef void c_relink(self, int32_t node) noexcept
    # `own` is the mark of the group that needs room.
    cdef int64_t c_evict(self, int64_t n, uint8_t own) noexcept
    cdef str audit(self)
