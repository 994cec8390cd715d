# cython: freethreading_compatible=True
"""A module outside the package that uses its memory without the GIL. The tests in this folder build and call it."""

from cpython.pycapsule cimport PyCapsule_Import
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from pagepool cimport BlockAllocator, KvCachePool, PagedSeqState, SsmStatePool
from pagepool.csrc cimport PP_EXHAUSTED, PP_INVALID_BLOCK, PP_OK, pp_lock, pp_status
from pagepool.memory.page_buffer cimport PageBuffer


cdef extern from "pagepool/allocator_api.h":
    const char *PP_ALLOCATOR_API
    ctypedef struct pp_allocator:
        pass
    ctypedef struct pp_allocator_api:
        int32_t abi_version
        pp_allocator *(*from_object)(void *) noexcept
        pp_status (*allocate)(pp_allocator *, int32_t *) noexcept nogil
        pp_status (*allocate_n)(pp_allocator *, int32_t, int32_t *) noexcept nogil
        pp_status (*free_n)(pp_allocator *, const int32_t *, int64_t) noexcept nogil
        pp_status (*share_n)(pp_allocator *, const int32_t *, int64_t) noexcept nogil
        int32_t (*ref_count)(pp_allocator *, int32_t) noexcept nogil
        int32_t (*free_count)(pp_allocator *) noexcept nogil


cdef double seconds() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


cdef uint64_t step(uint64_t *state) noexcept nogil:
    state[0] ^= state[0] << 13
    state[0] ^= state[0] >> 7
    state[0] ^= state[0] << 17
    return state[0]


def hammer(BlockAllocator allocator, double duration, uint64_t seed):
    """Allocate, share and free at random without the GIL, then free all blocks; return (rounds, refusals, errors).

    Marks every block that it holds. A block with the mark of another thread is an error.
    """
    cdef int32_t held[256]
    cdef int64_t rounds = 0, refusals = 0, errors = 0
    cdef int32_t n = 0, wanted, i
    cdef uint64_t random = seed * 2654435761 + 1
    cdef double end = seconds() + duration
    cdef pp_status status
    with nogil:
        while rounds == 0 or seconds() < end:
            for _ in range(100):
                rounds += 1
                wanted = <int32_t>(step(&random) % 24)
                if step(&random) & 1 and n + wanted <= 256:
                    status = allocator.c_allocate_n(wanted, held + n)
                    if status == PP_OK:
                        for i in range(n, n + wanted):
                            errors += allocator.c_ref_count(held[i]) != 1
                        n += wanted
                    else:
                        refusals += 1
                        errors += status != PP_EXHAUSTED
                elif wanted <= n:
                    n -= wanted
                    if wanted:
                        errors += allocator.c_share_n(held + n, 1) != PP_OK
                        errors += allocator.c_ref_count(held[n]) != 2
                        errors += allocator.c_free(held[n]) != PP_OK
                    errors += allocator.c_free_n(held + n, wanted) != PP_OK
                if n == 0 and allocator.c_allocate(held) == PP_OK:
                    n = 1
        errors += allocator.c_free_n(held, n) != PP_OK
    return rounds, refusals, errors


def hammer_sequences(KvCachePool pool, list forks, double patience, float value):
    """Append K and V of `value` to forks of one parent without the GIL, and truncate. Each fork copies shared blocks.

    Returns (appended tokens, errors). The parent's tokens must be 1, all other tokens `value`.
    """
    cdef PagedSeqState state
    cdef PagedSeqState parent = forks[0]
    cdef int64_t shared_len = parent.length, appended = 0, errors = 0, n, slot
    cdef Py_ssize_t row = pool.c_pool.layout.num_kv_heads * pool.c_pool.layout.head_dim, i
    cdef float *k = <float *>malloc(<size_t>(2 * 256 * row) * sizeof(float))
    cdef float *v = k + 256 * row
    cdef float *token = <float *>malloc(<size_t>row * sizeof(float))
    cdef double end = seconds() + patience
    for i in range(row):
        token[i] = value
    try:
        for state in forks:
            with nogil:
                while state.length < shared_len + 40 and seconds() < end:
                    if state.c_append(1, &slot) != PP_OK:
                        break
                    errors += pool.c_append(0, &slot, 1, token, token, row, pool.c_pool.layout.head_dim) != PP_OK
                    appended += 1
                n = state.length
                errors += pool.c_gather(0, state.c_blocks, state.num_blocks, n, k, v) != PP_OK
                for i in range(n * row):
                    errors += k[i] != (1 if i // row < shared_len else value)
                for _ in range(3):
                    if state.length > shared_len:
                        errors += state.c_truncate(state.length - 1) != PP_OK
    finally:
        free(k)
        free(token)
    return appended, errors


def time_pair(BlockAllocator allocator, int64_t n):
    """Return the nanoseconds of allocate + free, without the GIL."""
    cdef int32_t block
    cdef double start = seconds()
    with nogil:
        for _ in range(n):
            allocator.c_allocate(&block)
            allocator.c_free(block)
    return (seconds() - start) / n * 1e9


def time_bulk(BlockAllocator allocator, int64_t n):
    """Return the nanoseconds per block of allocate_n(64) + free, without the GIL."""
    cdef int32_t blocks[64]
    cdef double start = seconds()
    with nogil:
        for _ in range(n):
            allocator.c_allocate_n(64, blocks)
            allocator.c_free_n(blocks, 64)
    return (seconds() - start) / n / 64 * 1e9


def set_count(BlockAllocator allocator, int32_t block, int32_t count):
    """Corrupt, or repair, a reference count."""
    allocator.ref_counts[block] = count


def set_freed(BlockAllocator allocator, int32_t place, int32_t block):
    """Corrupt, or repair, an entry of the free list; return the previous value."""
    before = allocator.freed[place]
    allocator.freed[place] = block
    return before


def set_num_freed(BlockAllocator allocator, int32_t number):
    """Corrupt, or repair, the length of the free list; return the previous value."""
    before = allocator.num_freed
    allocator.num_freed = number
    return before


def statuses_of_bad_calls(PagedSeqState state, SsmStatePool states):
    """Return the statuses of c_ methods for invalid arguments: without the GIL they must not raise."""
    cdef int32_t block = 99, slot = 99
    with nogil:
        negative = state.allocator.c_allocate_n(-1, &block)
        foreign = state.allocator.c_free(-5)
        count = state.allocator.c_ref_count(1 << 30)
        append = state.c_append(-1, NULL)
        over = state.c_append(<int64_t>1 << 62, NULL)
        reserve = state.c_ensure_capacity(-1)
        truncate = state.c_truncate(state.length + 1)
        empty = state.c_append(0, NULL)
        release = states.c_release(slot)
    return [negative, foreign, count, append, over, reserve, truncate, empty, release]


def through_the_api(object allocator):
    """Allocate, share and free through the capsule; return the result of each call."""
    cdef const pp_allocator_api *api = <const pp_allocator_api *>PyCapsule_Import(PP_ALLOCATOR_API, 0)
    cdef pp_allocator *handle = api.from_object(<void *>allocator)
    cdef int32_t blocks[3]
    if handle == NULL:
        return None
    answers = [api.abi_version]
    with nogil:
        first = api.allocate(handle, blocks)
        bulk = api.allocate_n(handle, 2, blocks + 1)
        too_many = api.allocate_n(handle, 1000, blocks)
        shared = api.share_n(handle, blocks, 2)
        count = api.ref_count(handle, blocks[1])
        free_count = api.free_count(handle)
        freed = api.free_n(handle, blocks, 3)
        again = api.free_n(handle, blocks + 2, 1)
        negative = api.free_n(handle, blocks, -1)
    answers += [first, bulk, too_many, shared, count, free_count, freed, again, negative]
    return answers, [blocks[i] for i in range(3)]


EXHAUSTED = PP_EXHAUSTED
INVALID_BLOCK = PP_INVALID_BLOCK


cdef extern from "pagepool/lock.h" nogil:
    void pp_read_begin(pp_lock *lock)
    void pp_read_end(pp_lock *lock)


def copy_for(KvCachePool pool, double duration, begun):
    """Hold the read lock for `duration` seconds, as during a page copy; return whether the pool kept its memory."""
    cdef PageBuffer buffer = pool.buffer
    cdef BlockAllocator allocator = pool.allocator
    cdef double end = seconds() + duration
    cdef bint there = True
    pp_read_begin(&allocator.lock)
    begun.set()
    with nogil:
        while seconds() < end:
            there = there and buffer.base != NULL
        pp_read_end(&allocator.lock)
    return there
