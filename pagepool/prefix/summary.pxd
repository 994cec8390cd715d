from libc.stdint cimport int32_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.prefix.cached_blocks cimport CachedBlocks


cdef class CacheSummary:
    cdef readonly BlockAllocator allocator
    cdef readonly int32_t block_size
    cdef readonly str policy
    cdef CachedBlocks cached
    cdef long long looked_up
    cdef long long hits
    cdef object __weakref__
