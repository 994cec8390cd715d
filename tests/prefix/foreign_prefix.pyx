"""A module outside the package that uses cached blocks without the GIL. The tests in this folder build and call it."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from pagepool cimport BlockAllocator
from pagepool.csrc cimport PP_OK


cdef double seconds() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


cdef uint64_t step(uint64_t *state) noexcept nogil:
    state[0] ^= state[0] << 13
    state[0] ^= state[0] >> 7
    state[0] ^= state[0] << 17
    return state[0]


def use_cached(BlockAllocator allocator, int32_t[::1] blocks, double duration, uint64_t seed):
    """Add and drop references to runs of cached blocks; return (rounds, errors)."""
    cdef int64_t rounds = 0, errors = 0
    cdef int32_t first, n, unknown[2]
    cdef int32_t number = <int32_t>blocks.shape[0]
    cdef uint64_t random = seed * 2654435761 + 1
    cdef double end = seconds() + duration
    with nogil:
        while rounds == 0 or seconds() < end:
            for _ in range(100):
                rounds += 1
                first = <int32_t>(step(&random) % number)
                n = 1 + <int32_t>(step(&random) % (number - first))
                errors += allocator.c_share_n(&blocks[first], n) != PP_OK
                unknown[0] = blocks[first]
                unknown[1] = -1
                # A share that fails midway and is rolled back.
                errors += allocator.c_share_n(unknown, 2) == PP_OK
                errors += allocator.c_free_n(unknown, 2) == PP_OK
                if n == 1:
                    errors += allocator.c_free(blocks[first]) != PP_OK
                else:
                    errors += allocator.c_free_n(&blocks[first], n) != PP_OK
    return rounds, errors
