from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.page_pool cimport PagePool


cdef class KvCachePool(PagePool):
    cdef readonly object layout
    cdef readonly Py_ssize_t page_size

    # What pp_kv_append and pp_kv_gather say, with K and V as f32; strides in elements, those of K being those of V
    # (pp_kv_append_rows takes others).
    cdef pp_status c_append(self, int32_t layer, const int64_t *slots, int64_t num_tokens, const float *k,
                            const float *v, int64_t token_stride, int64_t head_stride) noexcept nogil
    cdef pp_status c_gather(self, int32_t layer, const int32_t *blocks, int64_t num_blocks, int64_t seq_len, float *k,
                            float *v) noexcept nogil

    cdef int adopt(self, object layout, BlockAllocator allocator) except -1
    cdef int32_t read_layer(self, object layer) except -1
