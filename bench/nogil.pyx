# cython: boundscheck=False, wraparound=False
"""Loops over the C interfaces of allocator and decode, like an engine that runs without the GIL."""

from libc.stdint cimport int32_t

from pagepool.attention.decode cimport c_decode
from pagepool.csrc cimport PP_OK
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.kv_pool cimport KvCachePool


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


def decode(KvCachePool pool, const float[:, :, ::1] q, const int32_t[:, ::1] tables, const int32_t[::1] lens,
           float[:, :, ::1] out, int rounds):
    """decode with one thread in each layer in turn, `rounds` calls; returns how many failed."""
    cdef int i, failed = 0
    with nogil:
        for i in range(rounds):
            failed += c_decode(pool, i % pool.c_pool.layout.num_layers, &q[0, 0, 0], <int32_t>q.shape[0],
                               <int32_t>q.shape[1], &tables[0, 0], tables.shape[1], &lens[0], 0.125, &out[0, 0, 0],
                               NULL, 1) != PP_OK
    return failed
