"""Loops over the allocator's C interface, as an engine without the GIL runs them."""

from libc.stdint cimport int32_t

from pagepool.csrc cimport PP_OK
from pagepool.memory.allocator cimport BlockAllocator


def pairs(BlockAllocator allocator, int rounds):
    """allocate + free, `rounds` times; returns how many failed."""
    cdef int32_t block
    cdef int _, failed = 0
    with nogil:
        for _ in range(rounds):
            failed += allocator.c_allocate(&block) != PP_OK
            failed += allocator.c_free(block) != PP_OK
    return failed


def bulk(BlockAllocator allocator, int rounds):
    """allocate_n(64) + free of the 64, `rounds` times; returns how many failed."""
    cdef int32_t blocks[64]
    cdef int _, failed = 0
    with nogil:
        for _ in range(rounds):
            failed += allocator.c_allocate_n(64, blocks) != PP_OK
            failed += allocator.c_free_n(blocks, 64) != PP_OK
    return failed
