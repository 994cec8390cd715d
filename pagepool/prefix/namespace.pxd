from libc.stdint cimport int32_t, int64_t, uint64_t

from pagepool.csrc cimport pp_status
from pagepool.prefix.cache cimport PrefixCache


cdef class PrefixNamespace:
    # While stamp == cache.cached.tree.stamp: root is the node that `key` has, or -1 when it has none.
    cdef readonly PrefixCache cache
    cdef bytes key
    cdef tuple named_key
    cdef int32_t root
    cdef uint64_t stamp

    # These may be called without the GIL, by one thread at a time: no other may be in a call of the cache meanwhile.
    # They take the GIL themselves where the policy, or memory, wants it; never with a lock held. n is in blocks: tokens
    # has n * block_size, blocks n. What fails has changed nothing.

    # How many of the first blocks are cached. Changes nothing. -1: no memory.
    cdef int64_t c_cached_blocks(self, const int32_t *tokens, int64_t n) noexcept nogil
    # As PrefixCache.match_prefix: writes `found` ids to blocks, each with one reference more. PP_NO_MEMORY;
    # PP_INVALID_BLOCK: a cached block was freed by someone else; PP_OVER_MAXIMUM: it has 2^31 - 1 references. Whoever
    # keeps those references has pinned the prefix: PrefixPins does no more, but for times and a budget.
    cdef pp_status c_match_prefix(
        self, const int32_t *tokens, int64_t n, int32_t *blocks, int64_t *found
    ) noexcept nogil
    # As PrefixCache.cache_blocks: `fresh` blocks are new to the cache. PP_INVALID_ARGUMENT for a start that is not from
    # 0 to n or a priority that the policy does not take; PP_INVALID_BLOCK, PP_OVER_MAXIMUM, PP_NO_MEMORY.
    cdef pp_status c_cache_blocks(
        self, const int32_t *tokens, int64_t n, const int32_t *blocks, int64_t start, int priority, int64_t *fresh
    ) noexcept nogil
    # As PrefixCache.evict: returns how many.
    cdef int64_t c_evict(self, int64_t n) noexcept nogil

    cdef bint c_find_root(self) noexcept nogil
    cdef bint c_reserve(self, int64_t n) noexcept
    cdef pp_status c_keep(
        self, const int32_t *tokens, int64_t n, const int32_t *blocks, int64_t start, int priority, int64_t *fresh
    ) noexcept
