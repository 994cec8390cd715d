from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from pagepool.csrc cimport pp_status
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


cdef class CachedBlocks:
    # The cache holds one reference to each cached block:
    #   owners[block] = node + 1, and 0 for a block that is not cached; nodes[owners[block] - 1].block = block
    #   kept has the cached blocks, each with the mark of its group
    #   num_cached = nodes with a block = nodes with a block in the policy's lists + nodes in `held` + those in `floors`
    #   inserted - evicted - cleared = num_cached
    cdef BlockAllocator allocator
    cdef KeptBlocks kept
    cdef CacheFloors floors
    cdef uint8_t mark  # of the blocks that come next
    cdef NodeTable table
    cdef EvictionPolicy order
    cdef PageBuffer owners_memory
    cdef int32_t *owners
    cdef NodeList held  # nodes whose blocks were in use when their turn came
    cdef int32_t *path  # room for the nodes and the blocks of one call
    cdef int64_t path_room
    cdef EventLog log  # or None
    cdef int32_t num_cached
    cdef long long inserted
    cdef long long evicted
    cdef long long cleared

    cdef int reset(self) except -1
    # The ids of all cached blocks.
    cdef list list_blocks(self)
    cdef int c_reserve_path(self, int64_t n) except -1
    cdef void c_pin(self, int32_t node) noexcept
    cdef void c_unpin(self, int32_t node) noexcept
    cdef int64_t c_walk(self, int32_t root, const int32_t *tokens, int64_t n, bint cached_only) noexcept nogil
    cdef void c_touch(self, int32_t node) noexcept
    cdef void c_touch_path(self, int64_t n) noexcept
    cdef void c_put(self, int32_t node, int32_t block) noexcept
    cdef void c_drop(self, int32_t node) noexcept
    # Drops the cache's reference to a block wherever it is; false when it is not cached.
    cdef bint c_discard(self, int32_t block) noexcept
    cdef bint c_in_use(self, int32_t node) noexcept
    cdef void c_return_held(self, int32_t most) noexcept
    cdef int32_t c_victim(self, uint8_t own) noexcept
    # Out of the list beside the policy's that it is in, and back to the policy.
    cdef void c_relink(self, int32_t node) noexcept
    # `own` is the mark of the group that needs room.
    cdef int64_t c_evict(self, int64_t n, uint8_t own) noexcept
    # The node of the last of n blocks, the first of which has the first of `tokens`, if it is cached under that root
    # and has these tokens; else -1.
    cdef int32_t c_last_of(self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n) noexcept
    # Room for n + 1 nodes must be reserved before the next two.
    cdef int64_t c_pass(self, int32_t root, const int32_t *tokens, int64_t n) noexcept
    cdef int64_t c_publish(
        self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start
    ) except -1
    # All of `PrefixCache.cache_blocks` but its arguments: a named key, mark, priority and its end as the policy has it.
    cdef int64_t keep(
        self, tuple key, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start, int mark, int level,
        uint64_t end
    ) except -1
    cdef str audit(self)
    cdef object refused(self, int64_t i, int32_t block, pp_status status)
