from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport IdArray
from pagepool.memory.block_refs cimport BlockRefs
from pagepool.memory.shared_pages cimport pp_lock, pp_shared_view
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.events cimport EventLog
from pagepool.prefix.eviction cimport BlockOrder
from pagepool.prefix.radix_tree cimport NamedBlock, NameSource
from pagepool.prefix.stored_pages cimport PageQueue


cdef extern from "shared/index.h" nogil:
    enum:
        PP_INDEX_BIT
        PP_INDEX_LISTED

    ctypedef struct pp_index_named:
        uint64_t hash
        uint32_t generation
        uint32_t state
        uint64_t name[2]
        uint64_t parent[2]

    ctypedef struct pp_index_names:
        uint64_t secret[2]
        pp_index_named *of
        int32_t *path
        uint8_t *offered
        pp_lock lock


# The order of eviction in this process, over the names of the blocks that any process has cached.
cdef class SharedOrder(BlockOrder):
    # A block of `node_of` is PP_INDEX_LISTED in `names`. The tokens of a node are the words of its name.
    cdef pp_shared_view *view
    cdef pp_index_names *names
    cdef PageBuffer room  # for the numbers of all blocks
    cdef uint64_t changes  # of the index, when `follow` last compared it

    # Marks the blocks of a path as used, if `is_found`, or enters those that this process has just cached. The names
    # of the blocks are known, and the tree has room.
    cdef void c_use(self, const int32_t *blocks, int64_t n, bint is_found) noexcept
    cdef void c_set(self, int32_t node, int32_t block) noexcept
    # Enters and removes what other processes have cached and evicted.
    cdef int follow(self) except -1
    cdef int reset(self) except -1


cdef class SharedIndex(NameSource):
    cdef BlockAllocator allocator
    cdef pp_shared_view *view
    cdef long long looked_up
    cdef long long hits
    cdef EventLog log  # or None
    cdef PageQueue queue  # of a store, or None
    cdef pp_index_names listed  # names for events
    cdef pp_index_names stored  # names for the store
    cdef SharedOrder order  # or None: the least recently used block of all processes first
    cdef pp_index_names ordered  # names for the order
    cdef list memory  # of these names
    cdef uint64_t changes  # counters of the index when `note_changes` last compared it with `listed`

    cdef int give_names(self, pp_index_names *names, bytes secret) except -1
    cdef int evict_by(self, str policy) except -1
    cdef int64_t evict_ordered(self, int64_t n) except -1
    cdef int note_events(self, int64_t max_events) except -1
    cdef int offer_to(self, PageQueue queue, bytes secret) except -1
    # Offers blocks that this process holds.  False when the queue is full.
    cdef bint c_offer(self, const int32_t *blocks, int64_t n) noexcept
    # Offers every cached block.  False when the queue is full.
    cdef bint offer_all(self) except -1
    # The names of those of the n blocks that are cached, in the store, or None if another process keeps the lock.
    cdef object names_of(self, const int32_t *blocks, int64_t n)
    # Notes events for what has changed since the last call, also by other processes.
    cdef int note_changes(self) except -1
    cdef void c_note_changes(self, int32_t *blocks) noexcept nogil

    # The arguments are those of PrefixCache, read: `key` from root_key, tokens as int32.
    cdef tuple match(self, const int32_t[::1] row, bytes key, bint in_part, BlockRefs held, bint is_use)
    cdef int64_t cached_tokens(self, const int32_t[::1] row, bytes key) except -1
    cdef int64_t insert(self, const int32_t[::1] row, bytes key, IdArray *blocks, uint64_t epoch) except -1
    cdef int64_t evict(self, int64_t n) except -1
    cdef int64_t forget(self, const int32_t *blocks, int64_t n) except -1
    cdef int64_t count(self, bint only_idle) noexcept
    cdef uint64_t inserted(self) noexcept
    cdef uint64_t epoch(self) noexcept
    cdef dict stats(self)
    cdef int check(self) except -1
    cdef int check_alive(self) except -1
