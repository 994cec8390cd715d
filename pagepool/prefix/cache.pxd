from libc.stdint cimport int32_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.prefix.cached_blocks cimport CachedBlocks
from pagepool.prefix.event_log cimport EventLog


cdef class PrefixCache:
    cdef readonly BlockAllocator allocator
    cdef readonly int32_t block_size
    cdef readonly str policy
    cdef CachedBlocks cached
    cdef long long looked_up
    cdef long long hits

    cdef EventLog log(self)
    cdef object match(self, tokens, cache_salt, extra_keys, bint in_part)
    cdef object __weakref__
