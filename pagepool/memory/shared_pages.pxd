from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagepool.csrc cimport pp_kv_layout, pp_lock, pp_status


cdef extern from "shared/pool.h" nogil:
    enum:
        PP_SHARED_BUDGET
        PP_SHARED_FINGERPRINT
        PP_SHARED_PATIENCE
        PP_SHARED_PROCESSES

    ctypedef struct pp_shared_shape:
        char magic[8]
        uint32_t byte_order
        uint32_t version
        pp_kv_layout layout
        int64_t num_blocks
        uint8_t channel_scale[16]
        int32_t fingerprint_bytes
        char fingerprint[1]
        char budget[1]

    ctypedef struct pp_shared_slot:
        uint64_t state
        int64_t pid

    ctypedef struct pp_shared_header:
        pp_shared_shape shape
        uint64_t inserted
        uint64_t evicted
        uint64_t forgotten
        pp_shared_slot slots[1]

    ctypedef struct pp_shared_census:
        pp_shared_header header
        int64_t limit
        int64_t in_use
        int64_t above_limit
        int64_t cached
        int64_t idle
        int64_t held[1]
        int is_live[1]

    ctypedef struct pp_shared_view "pp_shared":
        unsigned char *base
        unsigned char *pages
        uint64_t *words
        int64_t num_blocks
        int64_t block_bytes
        int fd
        int64_t peak
        int64_t blocker
        pp_lock *lock

    int pp_shared_create(int fd, const pp_shared_shape *shape, int64_t limit, uint64_t seed)
    int pp_shared_read(int fd, pp_shared_shape *shape)
    int pp_shared_read_cost(int fd, char *budget, int64_t *bytes)
    size_t pp_shared_bytes(int64_t num_blocks, const pp_kv_layout *layout)
    int64_t pp_shared_cost(int64_t num_blocks, const pp_kv_layout *layout, int64_t limit)
    int pp_shared_open(pp_shared_view *view, int fd, const pp_shared_shape *shape)
    void pp_shared_leave(pp_shared_view *view)
    void pp_shared_close(pp_shared_view *view)
    void pp_shared_free(pp_shared_view *view)
    bint pp_shared_is_stale(const pp_shared_view *view)
    pp_status pp_shared_take(pp_shared_view *view, int32_t n, int32_t *blocks)
    void pp_shared_drop(pp_shared_view *view, const int32_t *blocks, int64_t n)
    void pp_shared_return_pending(pp_shared_view *view)
    bint pp_shared_is_held_elsewhere(const pp_shared_view *view, int32_t block)
    int pp_shared_reap(pp_shared_view *view)
    int64_t pp_shared_count_free(const pp_shared_view *view)
    int64_t pp_shared_count_in_use(const pp_shared_view *view)
    int64_t pp_shared_limit(const pp_shared_view *view)
    int64_t pp_shared_allocated(int fd)
    int pp_shared_take_census(int fd, pp_shared_census *census)
    int pp_shared_processes(const pp_shared_view *view)
    const char *pp_shared_audit(const pp_shared_view *view, const int32_t *counts, int32_t *block)

cdef extern from "shared/index.h" nogil:
    int pp_index_set_limit(pp_shared_view *view, int64_t limit, int64_t patience)
    int64_t pp_index_limit_without(const pp_shared_view *view, int64_t bytes)


cdef class SharedPages:
    cdef pp_shared_view view
    cdef readonly object shared  # the name, or the descriptor that was given
    cdef readonly long pid  # of the process that attached
    cdef bint is_closed
    cdef readonly object budget  # a MemoryBudget or None

    cdef int attach(self, object shared, const pp_shared_shape *shape, int64_t limit) except -1
    cdef object make(self, const pp_shared_shape *shape, int64_t limit)
    cdef int fill(self, int fd, const pp_shared_shape *shape, int64_t limit) except -1
    # Checks the file, and attaches; on success the view owns `fd`.
    cdef int open(self, int fd, const pp_shared_shape *shape) except -1
    cdef int compare(self, const pp_shared_shape *found, const pp_shared_shape *shape) except -1
    # The StaleHandle of a view that is stale.
    cdef object stale(self)
    # The PoolError of a call that gave up waiting for a lock of another process.
    cdef object refuse_wait(self, str what)
    # After `close` the view is stale, and the process holds no block.
    cdef void close(self) noexcept
    cdef int set_limit(self, int32_t limit) except -1
    cdef int apply_limit(self, int32_t limit, int64_t patience) except -1
    # How many bytes more the pool needs for the limit.
    cdef int64_t missing(self, int64_t limit) except -1
    # The highest limit up to `wanted` if the pool may grow by `room` bytes.
    cdef int64_t reach(self, int64_t wanted, int64_t room) except -1
    # Frees the blocks of dead processes; returns the number of these processes.
    cdef int reap(self, pp_lock *lock) except -1


# Attaches to a pool of this shape, or makes one.
cdef SharedPages attach_shared(
    object shared, const pp_kv_layout *layout, object channel_scale, int64_t num_blocks, int64_t limit,
    object fingerprint, object budget
)
