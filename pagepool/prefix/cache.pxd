from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.block_refs cimport HeldBlocks
from pagepool.prefix.events cimport Event, EventLog
from pagepool.prefix.eviction cimport EvictableBlocks


cdef class PrefixCache:
    cdef readonly BlockAllocator allocator
    cdef readonly int32_t block_size
    cdef readonly str policy
    cdef EvictableBlocks cached
    cdef long long looked_up
    cdef long long hits
    cdef object __weakref__
    cdef uint8_t mark  # of the blocks that come next
    cdef bint stays  # what is cached, whoever uses it, while blocks are kept
    cdef int32_t *path  # room for the nodes and the blocks of one call
    cdef int64_t path_room

    cdef EventLog log(self)
    cdef tuple match(self, tokens, cache_salt, extra_keys, bint in_part, HeldBlocks held)

    # One of `drain_events`, without the GIL, while no other thread is in a call of the cache: see EventLog.c_next.
    # Returns 0 also when the cache notes none.
    cdef int64_t c_next_event(self, Event *event, int32_t *tokens) noexcept nogil

    cdef int c_reserve_path(self, int64_t n) except -1
    cdef int64_t c_walk(self, int32_t root, const int32_t *tokens, int64_t n, bint cached_only) noexcept nogil
    cdef void c_touch(self, int32_t node) noexcept
    cdef void c_touch_path(self, int64_t n) noexcept
    # The node of the last of n blocks, the first of which has the first of `tokens`, if it is cached under that root
    # and has these tokens; else -1.
    cdef int32_t c_last_of(self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n) noexcept
    # Whether a block, in use and not cached, is to take the place of the node's, which is idle.
    cdef bint c_gives_way(self, int32_t node, int32_t block) noexcept
    # Room for n + 1 nodes must be reserved before the next three.
    cdef int64_t c_pass(self, int32_t root, const int32_t *tokens, int64_t n) noexcept
    # n blocks of `tokens` behind `node`, which has none of them, get nodes.
    cdef void c_add(self, int32_t node, const int32_t *tokens, int64_t n, const int32_t *blocks) noexcept
    cdef bint c_takes(self, int64_t i, int64_t known) noexcept
    cdef int64_t c_publish(
        self, int32_t root, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start
    ) except -1
    # All of `PrefixCache.cache_blocks` but its arguments: a named key, mark, priority and its end as the policy has it;
    # and whether all that is cached stays.
    cdef int64_t keep(
        self, tuple key, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start, int mark, int level,
        uint64_t end, bint stays
    ) except -1
    cdef object refused(self, int64_t i, int32_t block, pp_status status)
