"""SharedIndex: the prefix index that all processes of a shared pool read and write."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy

from pagepool.csrc cimport pp_lock_acquire, pp_lock_release
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport IdArray, new_int32
from pagepool.memory.block_refs cimport BlockRefs
from pagepool.memory.shared_pages cimport (
    SharedPages,
    pp_shared_is_stale,
    pp_shared_return_pending,
    pp_shared_view,
)

from pagepool.errors import InvalidBlock, PoolError
from pagepool.prefix.keys import key_digest

__all__ = []

cdef extern from "shared/index.h" nogil:
    ctypedef struct pp_index_path:
        uint64_t root[2]
        const int32_t *tokens
        int64_t n

    int64_t pp_index_match(pp_shared_view *view, const pp_index_path *path, int32_t *counts, int32_t *blocks)
    int64_t pp_index_insert(
        pp_shared_view *view, const pp_index_path *path, const int32_t *blocks, const int32_t *counts, uint64_t epoch,
        int64_t *failed
    )
    int64_t pp_index_evict(pp_shared_view *view, int64_t n)
    uint64_t pp_index_epoch(const pp_shared_view *view)
    int64_t pp_index_forget(pp_shared_view *view, const int32_t *blocks, int64_t n)
    int64_t pp_index_count(const pp_shared_view *view, int only_idle)
    const char *pp_index_audit(pp_shared_view *view)


cdef extern from *:
    """
    #define pp_count_of(view, name) __atomic_load_n(&(view)->header->name, __ATOMIC_RELAXED)
    #define pp_inserted(view) pp_count_of(view, inserted)
    #define pp_evicted(view) pp_count_of(view, evicted)
    #define pp_forgotten(view) pp_count_of(view, forgotten)
    """
    uint64_t pp_inserted(const pp_shared_view *view) nogil
    uint64_t pp_evicted(const pp_shared_view *view) nogil
    uint64_t pp_forgotten(const pp_shared_view *view) nogil


cdef pp_index_path path_of(const int32_t[::1] row, int64_t n, bytes key) except *:
    cdef pp_index_path path
    cdef bytes name = key_digest(key)
    memcpy(path.root, <const char *>name, sizeof(path.root))
    path.tokens = &row[0] if row.shape[0] else NULL
    path.n = n
    return path


@cython.final
@cython.auto_pickle(False)
cdef class SharedIndex:
    """Looks up and caches blocks for a `PrefixCache` over the allocator of a shared pool. Internal.

    The index holds a block by a bit in the word of the block. So the cached blocks belong to no process, and the
    private reference counts do not include them.
    """

    def __cinit__(self, BlockAllocator allocator not None, int32_t block_size):
        self.allocator = allocator
        self.view = &(<SharedPages?>allocator.shared_pages).view
        self.block_size = block_size

    cdef int check_alive(self) except -1:
        if pp_shared_is_stale(self.view):
            raise (<SharedPages>self.allocator.shared_pages).stale()
        return 0

    cdef tuple match(self, const int32_t[::1] row, bytes key, BlockRefs held, bint is_use):
        cdef int64_t n = row.shape[0] // self.block_size, found
        cdef pp_index_path path = path_of(row, n, key)
        cdef int32_t *ids
        blocks = new_int32(n, &ids)
        if held is not None:
            held.c_reserve(n)
        with nogil:
            pp_lock_acquire(&self.allocator.lock)
            found = pp_index_match(self.view, &path, self.allocator.c_counts, ids)
            pp_lock_release(&self.allocator.lock)
            pp_shared_return_pending(self.view)
        if held is not None:
            held.c_note(ids, found)
        self.check_alive()
        if is_use:
            self.looked_up += n
            self.hits += found
        return blocks[:found], found * self.block_size

    cdef int64_t cached_tokens(self, const int32_t[::1] row, bytes key) except -1:
        cdef pp_index_path path = path_of(row, row.shape[0] // self.block_size, key)
        cdef int64_t found
        with nogil:
            found = pp_index_match(self.view, &path, NULL, NULL)
        self.check_alive()
        return found * self.block_size

    cdef int64_t insert(self, const int32_t[::1] row, bytes key, IdArray *blocks, uint64_t epoch) except -1:
        cdef pp_index_path path = path_of(row, row.shape[0] // self.block_size, key)
        cdef int64_t failed = 0, fresh
        with nogil:
            fresh = pp_index_insert(self.view, &path, blocks.ids, self.allocator.c_counts, epoch, &failed)
        self.check_alive()
        if fresh >= 0:
            return fresh
        block = blocks.ids[failed]
        if not 0 <= block < self.allocator.max_capacity:
            raise InvalidBlock(f"block {block} is out of range: there are {self.allocator.max_capacity} blocks")
        if self.allocator.c_ref_count(block) < 1:
            raise InvalidBlock(f"block {block} cannot be cached: it is free in this process")
        raise InvalidBlock(f"block {block}, given at {failed}, is cached already, for other tokens")

    cdef int64_t evict(self, int64_t n) except -1:
        cdef int64_t done
        with nogil:
            done = pp_index_evict(self.view, n)
        self.check_alive()
        return done

    cdef int64_t forget(self, const int32_t *blocks, int64_t n) except -1:
        cdef int64_t done
        with nogil:
            done = pp_index_forget(self.view, blocks, n)
        self.check_alive()
        if done < 0:
            raise (<SharedPages>self.allocator.shared_pages).refuse_wait("the index")
        return done

    cdef int64_t count(self, bint only_idle) noexcept:
        return pp_index_count(self.view, only_idle)

    cdef uint64_t inserted(self) noexcept:
        return pp_inserted(self.view)

    cdef uint64_t epoch(self) noexcept:
        return pp_index_epoch(self.view)

    cdef dict stats(self):
        cdef int64_t capacity = self.allocator.c_capacity(), free = self.allocator.c_free_count()
        cdef int64_t evictable = self.count(True), cached = self.count(False)
        return {
            "policy": "lru",
            "capacity": capacity,
            "cached": cached,
            "used": capacity - free - evictable,
            "evictable": evictable,
            "free": free,
            "looked_up": self.looked_up,
            "hits": self.hits,
            "inserted": self.inserted(),
            "evicted": pp_evicted(self.view),
            "cleared": pp_forgotten(self.view),
            "nodes": cached,
            "collisions": 0,
        }

    cdef int check(self) except -1:
        cdef const char *broken
        with nogil:
            broken = pp_index_audit(self.view)
        self.check_alive()
        if broken != NULL:
            raise PoolError(f"broken invariant: {broken.decode()}")
        return 0
