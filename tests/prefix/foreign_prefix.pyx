"""A module outside the package that works on cached blocks without the GIL. Built and driven by the tests beside it."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from pagepool cimport BlockAllocator, PrefixCache, PrefixNamespace
from pagepool.csrc cimport PP_OK, pp_status
from pagepool.prefix.events cimport CLEARED, REMOVED, STORED, Event


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
    """Takes and drops references to runs of blocks that a cache keeps; returns (rounds, errors)."""
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
                # Half done, and then undone.
                errors += allocator.c_share_n(unknown, 2) == PP_OK
                errors += allocator.c_free_n(unknown, 2) == PP_OK
                if n == 1:
                    errors += allocator.c_free(blocks[first]) != PP_OK
                else:
                    errors += allocator.c_free_n(&blocks[first], n) != PP_OK
    return rounds, errors


def serve(
    PrefixNamespace namespace not None, const int32_t[::1] tokens not None, int32_t[::1] blocks not None, int priority
):
    """What an engine does with a prompt, all of it without the GIL; its blocks are in `blocks` then, with a reference.

    Returns the status, blocks found, blocks cached anew, and blocks evicted.
    """
    cdef PrefixCache cache = namespace.cache
    cdef BlockAllocator allocator = cache.allocator
    cdef int64_t n = tokens.shape[0] // cache.block_size, found = 0, fresh = 0, evicted = 0
    cdef const int32_t *first = &tokens[0] if tokens.shape[0] else NULL
    cdef int32_t *table = &blocks[0]
    cdef int32_t missing
    cdef pp_status status
    with nogil:
        status = namespace.c_match_prefix(first, n, table, &found)
        if status == PP_OK:
            missing = <int32_t>(n - found)
            if allocator.c_free_count() < missing:
                evicted = namespace.c_evict(missing - allocator.c_free_count())
            status = allocator.c_allocate_n(missing, table + found)
            if status == PP_OK:
                status = namespace.c_cache_blocks(first, n, table, found, priority, &fresh)
            else:
                allocator.c_free_n(table, found)
    return status, found, fresh, evicted


def cached_blocks(PrefixNamespace namespace, const int32_t[::1] tokens):
    """How many of the first blocks are cached."""
    cdef int64_t n = tokens.shape[0] // namespace.cache.block_size, count
    with nogil:
        count = namespace.c_cached_blocks(&tokens[0], n)
    return count


def cache(PrefixNamespace namespace, const int32_t[::1] tokens, const int32_t[::1] blocks, int64_t start, int priority):
    """The status of c_cache_blocks, and how many blocks were new."""
    cdef int64_t fresh = -1, n = tokens.shape[0] // namespace.cache.block_size
    cdef pp_status status
    with nogil:
        status = namespace.c_cache_blocks(&tokens[0], n, &blocks[0], start, priority, &fresh)
    return status, fresh


def next_events(PrefixCache cache, int64_t most):
    """Up to so many events, as tuples like PrefixEvent, each taken without the GIL."""
    cdef int32_t tokens[1024]
    cdef Event event
    cdef int64_t number
    kinds, found = {STORED: "stored", REMOVED: "removed", CLEARED: "cleared"}, []
    while len(found) < most:
        with nogil:
            number = cache.c_next_event(&event, tokens)
        if number == 0:
            break
        named = 16 if event.kind != CLEARED else 0
        row = <bytes>(<char *>tokens)[: 4 * cache.block_size] if event.kind == STORED else b""
        names = <bytes>(<char *>event.name)[:named], <bytes>(<char *>event.parent)[:named]
        found.append((number, kinds[event.kind], event.block, *names, row))
    return found


# Of these the status alone, so that nothing but the call itself wants memory.

def status_of_match(PrefixNamespace namespace, const int32_t[::1] tokens, int32_t[::1] blocks):
    cdef int64_t found, n = tokens.shape[0] // namespace.cache.block_size
    cdef pp_status status
    with nogil:
        status = namespace.c_match_prefix(&tokens[0], n, &blocks[0], &found)
    return <int>status


def status_of_cache(PrefixNamespace namespace, const int32_t[::1] tokens, const int32_t[::1] blocks, int64_t start):
    cdef int64_t fresh, n = tokens.shape[0] // namespace.cache.block_size
    cdef pp_status status
    with nogil:
        status = namespace.c_cache_blocks(&tokens[0], n, &blocks[0], start, 0, &fresh)
    return <int>status
