from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.kept cimport KeptBlocks
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.event_log cimport EventLog
from pagepool.prefix.floors cimport CacheFloors
from pagepool.prefix.node cimport NodeList
from pagepool.prefix.node_table cimport NodeTable
from pagepool.prefix.policy cimport EvictionPolicy


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
