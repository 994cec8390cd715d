"""PrefixNamespace: a prefix cache as engines in Cython reach it, without the GIL and without Python objects."""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagepool.csrc cimport (
    PP_INVALID_ARGUMENT,
    PP_INVALID_BLOCK,
    PP_NO_MEMORY,
    PP_OK,
    PP_OVER_MAXIMUM,
    pp_status,
)
from pagepool.prefix.cache cimport PrefixCache
from pagepool.prefix.eviction cimport CACHED

from pagepool.errors import InvalidBlock, PoolError, refuse_copy
from pagepool.prefix.keys import root_key

__all__ = ["PrefixNamespace"]


@cython.final
cdef class PrefixNamespace:
    """The prompts of a prefix cache under one salt and one set of keys, for its `c_` methods: see namespace.pxd.

    It holds no block. Any number of them may be made, before or after prompts are cached.

    >>> from pagepool import BlockAllocator, PrefixCache
    >>> cache = PrefixCache(BlockAllocator(4))
    >>> PrefixNamespace(cache, cache_salt="tenant").cache is cache
    True
    """

    def __cinit__(self, PrefixCache cache not None, *, cache_salt=None, extra_keys=()):
        self.cache = cache
        self.key = root_key(cache_salt, extra_keys)
        self.named_key = cache.cached.tree.named_key(self.key)
        self.root = -1
        self.stamp = cache.cached.tree.stamp - 1

    def __reduce__(self):
        refuse_copy(self)

    cdef bint c_find_root(self) noexcept nogil:
        """Roots change seldom: when the first block of a key is cached, or its last one goes."""
        if self.stamp != self.cache.cached.tree.stamp:
            with gil:
                self.root = self.cache.cached.tree.roots.get(self.key, -1)
                self.stamp = self.cache.cached.tree.stamp
        return self.root >= 0

    cdef bint c_reserve(self, int64_t n) noexcept:
        """What a look-up of n blocks may want; false when there is no memory."""
        try:
            self.cache.c_reserve_path(n)
            self.cache.cached.policy.c_reserve(n)
        except MemoryError:
            return False
        return True

    cdef int64_t c_cached_blocks(self, const int32_t *tokens, int64_t n) noexcept nogil:
        if n <= 0 or not self.c_find_root():
            return 0
        if n > self.cache.path_room:
            with gil:
                if not self.c_reserve(n):
                    return -1
        return self.cache.cached.tree.c_walk(self.root, tokens, n, True, self.cache.path)

    cdef pp_status c_match_prefix(
        self, const int32_t *tokens, int64_t n, int32_t *blocks, int64_t *found
    ) noexcept nogil:
        cdef int64_t count = self.c_cached_blocks(tokens, n), i
        cdef pp_status status
        found[0] = 0
        if count < 0:
            return PP_NO_MEMORY
        for i in range(count):
            blocks[i] = self.cache.cached.tree.nodes[self.cache.path[i]].block
        if count:
            status = self.cache.allocator.c_share_n(blocks, count)
            if status != PP_OK:
                return status
            with gil:
                if not self.c_reserve(count):
                    self.cache.allocator.c_free_n(blocks, count)
                    return PP_NO_MEMORY
                self.cache.c_touch_path(count)
        self.cache.looked_up += n if n > 0 else 0
        self.cache.hits += count
        found[0] = count
        return PP_OK

    cdef pp_status c_cache_blocks(
        self, const int32_t *tokens, int64_t n, const int32_t *blocks, int64_t start, int priority, int64_t *fresh
    ) noexcept nogil:
        fresh[0] = 0
        if not 0 <= start <= n or not 0 <= priority <= 255:
            return PP_INVALID_ARGUMENT
        if priority and not self.cache.cached.policy.takes_priority:
            return PP_INVALID_ARGUMENT
        if n == 0:
            return PP_OK
        with gil:
            return self.c_keep(tokens, n, blocks, start, priority, fresh)

    cdef pp_status c_keep(
        self, const int32_t *tokens, int64_t n, const int32_t *blocks, int64_t start, int priority, int64_t *fresh
    ) noexcept:
        try:
            with cython.critical_section(self.cache):
                fresh[0] = self.cache.keep(self.named_key, tokens, blocks, n, start, CACHED, priority, 0, False)
        except InvalidBlock:
            return PP_INVALID_BLOCK
        except PoolError:
            return PP_OVER_MAXIMUM
        except MemoryError:
            return PP_NO_MEMORY
        return PP_OK

    cdef int64_t c_evict(self, int64_t n) noexcept nogil:
        cdef int64_t count = 0
        if n > 0:
            with gil:
                count = self.cache.cached.c_evict(min(n, <int64_t>INT32_MAX), CACHED)
        return count
