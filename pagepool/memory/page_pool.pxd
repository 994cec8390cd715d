from pagepool.csrc cimport pp_kv_pool
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.page_buffer cimport PageBuffer


cdef class PagePool:
    #   c_pool.base == buffer.base, page i at base + i * c_pool.layout.block_bytes
    #   allocator.max_capacity <= c_pool.num_blocks: every id has a page
    # A flat pool's c_pool.layout has item_bytes, block_bytes and dtype, and 0 for all else. After close, base is NULL
    # and num_blocks 0. Whoever reads c_pool without the GIL calls c_pin before and c_unpin after, with it.
    cdef pp_kv_pool c_pool
    cdef readonly BlockAllocator allocator
    cdef PageBuffer buffer
    cdef bint elastic  # has room for more blocks than it began with
    cdef object __weakref__

    # Keeps `close` from taking the memory away.
    cdef void c_pin(self) noexcept
    cdef void c_unpin(self) noexcept
    cdef int check_open(self) except -1
