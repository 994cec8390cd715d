from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_kv_pool, pp_status
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.page_buffer cimport PageBuffer


cdef class KvCachePool:
    #   c_pool.base == buffer.base, page i at base + i * c_pool.layout.block_bytes
    #   allocator.max_capacity <= c_pool.num_blocks: every id has a page
    # In a flat pool, c_pool.layout has only item_bytes, block_bytes and dtype; the rest is 0. After close, base is NULL
    # and num_blocks 0. Code that reads c_pool without the GIL calls `pin` before and `unpin` after, both with the GIL.
    cdef pp_kv_pool c_pool
    cdef int kind  # dtype of the elements in views: a pp_dtype, PP_INT8 for bytes
    cdef readonly object k_channel_scale  # or None; c_pool has its address
    cdef readonly BlockAllocator allocator
    cdef PageBuffer buffer
    cdef bint elastic  # can have more blocks than at the start
    cdef readonly object layout
    cdef readonly Py_ssize_t page_size
    cdef object __weakref__

    # In checked mode: the first token with a slot in a block that is free or has several references, -1 if all slots
    # may be written. Not in checked mode: -1.
    cdef int64_t c_first_unwritable(self, const int64_t *slots, int64_t num_tokens) noexcept nogil
    # pp_kv_append and pp_kv_gather, with K and V as f32. Strides are in elements and the same for K and V
    # (pp_kv_append_rows takes different ones). PP_INVALID_SLOT also for a slot that checked mode refuses.
    cdef pp_status c_append(self, int32_t layer, const int64_t *slots, int64_t num_tokens, const float *k,
                            const float *v, int64_t token_stride, int64_t head_stride) noexcept nogil
    cdef pp_status c_gather(self, int32_t layer, const int32_t *blocks, int64_t num_blocks, int64_t seq_len, float *k,
                            float *v) noexcept nogil

    cdef int adopt(self, object layout, BlockAllocator allocator) except -1
    cdef int32_t read_layer(self, object layer) except -1
    # Until `unpin`, `close` cannot free the memory. Raises ValueError when the pool is closed.
    cdef int pin(self) except -1
    cdef void unpin(self) noexcept
    cdef int check_open(self) except -1
