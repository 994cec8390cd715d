cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagepool.csrc cimport (
    PP_EXHAUSTED,
    PP_INVALID_BLOCK,
    PP_OK,
    pp_kv_pool,
    pp_lock,
    pp_lock_release,
    pp_lock_try,
    pp_status,
)
from pagepool.memory.arrays cimport IdArray


cdef extern from *:
    """
    typedef struct pp_regions pp_regions;
    typedef struct pp_shared pp_shared;
    """
    ctypedef struct pp_regions:
        pass
    ctypedef struct pp_shared:
        pass


cdef extern from *:
    """
    /* An owner of a block reads the count without the lock, and another owner may drop its reference meanwhile. Release
     * and acquire order the reads of the other owner before the writes of this one. */
    #define pp_set_count(count, value) __atomic_store_n(count, value, __ATOMIC_RELEASE)
    #define pp_get_count(count) __atomic_load_n(count, __ATOMIC_ACQUIRE)
    /* A word is {generation:32 | holders:32}; only one bit of holders is in use. The fence orders the word before every
     * byte that the new owner writes: a process that reads the page, then the word, sees whether the page changed. */
    static inline void pp_word_taken(uint64_t *word) {
        __atomic_store_n(word, ((*word >> 32) + 1) << 32 | 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
    }
    static inline void pp_word_freed(uint64_t *word) {
        __atomic_store_n(word, *word >> 32 << 32, __ATOMIC_RELAXED);
    }
    /* Not inlined: inside the loops over counts they cost 0.4 ns per block, even in an allocator without words. */
    __attribute__((noinline, unused))
    static void pp_words_taken(uint64_t *words, const int32_t *blocks, int32_t n) {
        for (int32_t i = 0; i < n; i++)
            pp_word_taken(&words[blocks[i]]);
    }
    __attribute__((noinline, unused))
    static void pp_words_freed(uint64_t *words, const int32_t *counts, const int32_t *blocks, Py_ssize_t n) {
        for (Py_ssize_t i = 0; i < n; i++)
            if (counts[blocks[i]] == 0)
                pp_word_freed(&words[blocks[i]]);
    }
    """
    void pp_word_taken(uint64_t *word) nogil
    void pp_word_freed(uint64_t *word) nogil
    void pp_words_taken(uint64_t *words, const int32_t *blocks, int32_t n) nogil
    void pp_words_freed(uint64_t *words, const int32_t *counts, const int32_t *blocks, Py_ssize_t n) nogil
    void pp_set_count(int32_t *count, int32_t value) nogil
    int32_t pp_get_count(int32_t *count) nogil


# The blocks to which a prefix cache holds a reference, see CachedRefs in block_refs.pxd. `next` is the list of another
# cache.
cdef struct CachedCounts:
    uint8_t *is_cached
    int64_t idle
    CachedCounts *next


# Updates `idle` after the count of a block fell to 1 or rose from 1.
cdef inline void count_idle(CachedCounts *cached, int32_t block, int change) noexcept nogil:
    while cached != NULL:
        if cached.is_cached[block]:
            cached.idle += change
        cached = cached.next


# A linked list of the sequences. Adding or removing one costs four stores with the allocator's lock held.
#   link.next.previous == link == link.previous.next; an empty list's head is linked to itself
cdef struct Link:
    Link *previous
    Link *next
    PyObject *sequence  # its address, or without a GIL a weak reference to it; NULL in the head


cdef struct Audit:
    const char *equation  # the broken one, or NULL
    int32_t left
    int32_t right


# Marks each listed block with a count of -1, which shows a block that is listed twice; removes the marks again.
cdef inline Audit audit_counts(const int32_t *freed, int32_t num_freed, int32_t taken, int32_t capacity,
                               int32_t *counts) noexcept nogil:
    cdef Audit audit = Audit(NULL, 0, 0)
    cdef int32_t i, block, marked = 0, used = 0
    if not 0 <= num_freed <= taken <= capacity:
        return Audit(b"0 <= num_freed <= taken <= capacity", num_freed, taken)
    for i in range(num_freed):
        block = freed[i]
        if not 0 <= block < taken:
            audit = Audit(b"a listed block is below taken", block, taken)
            break
        if counts[block] != 0:
            audit = Audit(b"a listed block has count 0, or -1 if it is listed twice", block, counts[block])
            break
        counts[block] = -1
        marked += 1
    for i in range(marked):
        counts[freed[i]] = 0
    if audit.equation != NULL:
        return audit
    for i in range(taken):
        if counts[i] < 0:
            return Audit(b"ref_count >= 0", i, counts[i])
        used += counts[i] > 0
    if used + num_freed != taken:
        return Audit(b"free + in_use == capacity", capacity - taken + num_freed, used)
    return audit


cdef inline Audit audit_words(const uint64_t *words, const int32_t *counts, int32_t taken) noexcept nogil:
    cdef int32_t b
    for b in range(taken):
        if <uint32_t>words[b] != <uint32_t>(counts[b] > 0):
            return Audit(b"words[b] & 1 == ref_counts[b] > 0", <int32_t>words[b], counts[b])
    return Audit(NULL, 0, 0)


@cython.final
cdef class BlockAllocator:
    # With the lock held; `taken` ids were handed out at least once:
    #   in_use = taken - num_freed            free = limit - in_use
    #   ref_counts[b] > 0                     for the in_use blocks
    #   ref_counts[b] == 0                    for those in freed[0:num_freed], each once, and for all b >= taken
    #   taken <= limit <= max_capacity        the arrays have room for max_capacity
    #   words[b] & 1 == ref_counts[b] > 0     and words[b] >> 32 counts how often b was taken, where they are kept
    #   peak_in_use = max(peak, taken)        since fresh ids are taken only when no freed one is left; `peak` is the
    #                                         most that `taken` was before it fell
    cdef pp_lock lock
    cdef int32_t limit  # the capacity
    cdef readonly int32_t max_capacity
    cdef int32_t taken
    cdef int32_t num_freed
    cdef int32_t peak
    cdef int32_t[::1] freed
    cdef int32_t[::1] ref_counts
    cdef int32_t *c_freed  # == &freed[0]
    cdef int32_t *c_counts  # == &ref_counts[0]
    cdef pp_regions *regions
    cdef CachedCounts *cached  # of all prefix caches, with the lock held
    cdef uint64_t *words  # of each block, see BlockGenerations; NULL unless they are kept
    cdef object word_buffer  # owns them
    # Of a shared pool, else NULL and None. Then the words of the file say which blocks are free. The private lists of
    # free blocks stay empty, so that only calls that find them empty look here: num_freed = 0, taken = max_capacity.
    # ref_counts are the references of this process.
    cdef pp_shared *shared
    cdef readonly object shared_pages
    cdef bint checked  # fill pages of freed blocks with NaN: set by a pool in checked mode, see KvCachePool
    cdef Link head  # of the list of sequences
    cdef Py_ssize_t num_sequences
    cdef list others  # weak references to holders of other types
    cdef object __weakref__

    # These methods are inlined into their callers, which saves a third of their time. Waiting is not inlined, so that
    # callers need not link the library. They use pointers, since the directives of the caller's module apply here and
    # could switch on bounds checks of memoryviews.

    # PP_EXHAUSTED when none is free.
    cdef inline pp_status c_allocate(self, int32_t *block) noexcept nogil:
        cdef pp_status status
        if not pp_lock_try(&self.lock):
            self.c_wait_for_lock()
        status = self.c_take(block)
        pp_lock_release(&self.lock)
        return status

    # With the lock held.
    cdef inline pp_status c_take(self, int32_t *block) noexcept nogil:
        cdef int32_t taken
        if self.num_freed:
            self.num_freed -= 1
            taken = self.c_freed[self.num_freed]
        elif self.taken < self.limit or self.c_extend(1):
            taken = self.taken
            self.taken += 1
        else:
            return self.c_take_shared(1, block)
        self.c_counts[taken] = 1
        if self.words != NULL:
            pp_word_taken(&self.words[taken])
        block[0] = taken
        return PP_OK

    # With the lock held: takes n blocks of a shared pool. PP_EXHAUSTED if the pool is private.
    cdef pp_status c_take_shared(self, int32_t n, int32_t *blocks) noexcept nogil
    # With the lock held: gives the blocks in the list of free blocks back to the shared pool.
    cdef void c_drop_shared(self) noexcept nogil
    # Without the lock: returns the memory of blocks above the limit of a shared pool that were given back.
    cdef void c_return_pending(self) noexcept nogil
    # The ids are those of a shared pool from now on. For an allocator that has handed out no block yet.
    cdef int join(self, object pages) except -1
    # With the lock held: raises the capacity, if the maximum allows, so that n fresh ids can be taken.
    cdef bint c_extend(self, int32_t n) noexcept nogil
    # The number of ids now.
    cdef int32_t c_capacity(self) noexcept nogil
    # Blocks that are free.
    cdef int32_t c_free_count(self) noexcept nogil
    # Blocks that can be taken: `c_free_count`, and the blocks by which the capacity may still grow.
    cdef int32_t c_available(self) noexcept nogil
    # Raises the capacity to n. False if n is below the capacity or above the maximum.
    cdef bint c_grow(self, int32_t n) noexcept nogil
    # Lowers the capacity to n, but not below a block in use. Returns the new capacity.
    cdef int32_t c_shrink(self, int32_t n) noexcept nogil
    # With the lock held: finds the first run of free ids from first[0] on and below `limit`, at most `most` ids. Writes
    # the first id to first[0]; returns the number of ids, 0 if no id is free.
    cdef int32_t c_free_run(self, int32_t *first, int32_t limit, int32_t most) noexcept nogil

    # All n or PP_EXHAUSTED; PP_INVALID_ARGUMENT for n < 0.
    cdef pp_status c_allocate_n(self, int32_t n, int32_t *blocks) noexcept nogil
    # PP_INVALID_BLOCK for one that is out of range or free.
    cdef inline pp_status c_free(self, int32_t block) noexcept nogil:
        cdef pp_status status
        if not pp_lock_try(&self.lock):
            self.c_wait_for_lock()
        status = self.c_give_back(block)
        pp_lock_release(&self.lock)
        if self.shared != NULL:
            self.c_return_pending()
        return status

    # With the lock held.
    cdef inline pp_status c_give_back(self, int32_t block) noexcept nogil:
        cdef int32_t count
        if <unsigned int>block >= <unsigned int>self.taken or self.c_counts[block] == 0:
            return PP_INVALID_BLOCK
        count = self.c_counts[block] - 1
        pp_set_count(&self.c_counts[block], count)
        if count == 0:
            self.c_freed[self.num_freed] = block
            self.num_freed += 1
            if self.words != NULL:
                if self.shared != NULL:
                    self.c_drop_shared()
                else:
                    pp_word_freed(&self.words[block])
            if self.checked:
                self.c_fill_freed(&block, 1)
        elif count == 1:
            count_idle(self.cached, block, 1)
        return PP_OK

    cdef void c_wait_for_lock(self) noexcept nogil
    # With the lock held: fills the page of each of the blocks that is free with NaN.
    cdef void c_fill_freed(self, const int32_t *blocks, Py_ssize_t n) noexcept nogil

    # Frees all n or returns PP_INVALID_BLOCK; `blocks` must not change meanwhile.
    cdef pp_status c_free_n(self, const int32_t *blocks, Py_ssize_t n) noexcept nogil
    # Shares all n, or returns PP_INVALID_BLOCK, or PP_OVER_MAXIMUM if a count would exceed 2^31 - 1.
    cdef pp_status c_share_n(self, const int32_t *blocks, Py_ssize_t n) noexcept nogil
    # As `c_share_n`, but raises the exceptions that `share` raises.
    cdef int c_share_ids(self, IdArray *array) except -1
    # For a block of the caller: true if other references exist. May be stale: can still be true after the last one was
    # dropped.
    cdef bint c_is_shared(self, int32_t block) noexcept nogil
    # Copies page src over page dst in every attached pool. The caller holds references to both blocks.
    cdef void c_copy_page(self, int32_t dst, int32_t src) noexcept nogil
    # `pool` must not move until it is detached. PP_INVALID_ARGUMENT: the pool has fewer pages than there are ids, or
    # another block size than an attached pool. PP_NO_MEMORY.
    cdef pp_status c_attach(self, const pp_kv_pool *pool) noexcept nogil
    cdef void c_detach(self, const pp_kv_pool *pool) noexcept nogil
    # Number of attached pools. Requires the GIL.
    cdef int32_t c_num_pools(self) noexcept nogil
    # The error of a caller that wants n blocks, and of one that names wrong ids.
    cdef object refused(self, object n)
    cdef object invalid(self, IdArray *array, verb)
    cdef int c_enlist(self, Link *link, object sequence) except -1
    cdef void c_delist(self, Link *link) noexcept
    # All living holders, sequences first.
    cdef list holders(self)
    # Ids below this were handed out at least once.
    cdef int32_t c_ids_used(self) noexcept nogil
    # 0 for a free block, -1 for an id out of range.
    cdef int32_t c_ref_count(self, int32_t block) noexcept nogil
    # Tokens of a block in the attached pools; 0 without a pool that has a layout.
    cdef int32_t c_block_size(self) noexcept nogil
    # Returns the block size for a new holder: `block_size`, or for None the block size of an attached pool, else 16.
    cdef int32_t read_block_size(self, object block_size) except -1
