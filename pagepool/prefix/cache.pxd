from libc.stdint cimport int32_t, int64_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport IdArray
from pagepool.memory.block_refs cimport BlockRefs
from pagepool.prefix.events cimport EventLog
from pagepool.prefix.eviction cimport CachedBlocks


cdef class PrefixCache:
    cdef readonly BlockAllocator allocator
    cdef readonly int32_t block_size
    cdef readonly str policy
    cdef CachedBlocks cached  # empty if `shared` is not None
    cdef object shared  # a SharedIndex over the allocator of a shared pool, else None
    cdef readonly object link  # a StoreLink, or None
    cdef long long followed  # `epoch` without the calls of other processes that `follow` has not seen
    cdef int32_t *path  # room for the nodes and the blocks of one call
    cdef int64_t path_room
    cdef long long looked_up
    cdef long long hits
    cdef object __weakref__

    cdef EventLog log(self)
    cdef object atomically(self, function)
    cdef list drain(self, EventLog log)
    cdef int note_events(self, int64_t max_events) except -1
    cdef int open_store(self, store) except -1
    # Call it before pages are read from the store or written to it.
    cdef int follow(self) except -1
    cdef tuple match(
        self, tokens, cache_salt, extra_keys, bint in_part, BlockRefs held, bint is_use, bint reads=*
    )
    cdef tuple match_cached(self, tokens, cache_salt, extra_keys, bint in_part, BlockRefs held, bint is_use)

    # Call the functions below inside the critical section of the cache, or while no other thread calls the cache.

    # The names in the store of the cached blocks among `ids`, or None if they cannot be told.
    cdef object names_of(self, IdArray *ids)
    # A context in which blocks are forgotten. `names()` returns the names of the blocks, or None for all.
    cdef object forgetting(self, names)
    cdef bint offer_all(self)
    cdef int refuse_next(self, const int32_t[::1] row, int64_t found) except -1
    cdef int c_reserve_path(self, int64_t n) except -1
    # `PrefixCache.cache_blocks` with arguments that were read before, and with a named key.
    cdef int64_t keep(
        self, tuple named_key, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start
    ) except -1
