from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_dtype, pp_kv_pool, pp_kv_rows
from pagepool.memory.arrays cimport Buffer, Tensor

cdef dict NAMES  # of the dtypes of pools and arrays


cdef class TokenRows:
    cdef const int64_t *slots
    cdef Py_ssize_t num_tokens
    cdef pp_kv_rows k_rows
    cdef pp_kv_rows v_rows  # equal to k_rows if the layout has V in K
    cdef pp_dtype dtype

    cdef Tensor k
    cdef Tensor v
    cdef Buffer slots_buffer
    cdef bint has_slots
    cdef int64_t *wide_slots

    # Raises TypeError for a dtype, ValueError for a shape or stride, and for arrays that overlap the pages.
    cdef int read(self, object slot_mapping, object k, object v, const pp_kv_pool *pool) except -1
    cdef int read_slots(self, object slot_mapping) except -1
    cdef pp_kv_rows rows_of(self, str name, Tensor *tensor, int32_t head_dim, const pp_kv_pool *pool) except *
