from libc.stdint cimport int32_t

from pagepool.attention.masks cimport MaskBits
from pagepool.csrc cimport pp_decode_args, pp_status
from pagepool.memory.arrays cimport Buffer, IntArray, Tensor
from pagepool.memory.kv_pool cimport KvCachePool


# The arguments of a call, read and checked; what they point to is held until the object goes.
cdef class Arguments:
    cdef pp_decode_args args
    cdef KvCachePool pool
    cdef Tensor q
    cdef object q_owner
    cdef IntArray tables
    cdef IntArray lengths
    cdef IntArray starts
    cdef MaskBits mask
    cdef Buffer out
    cdef bint has_out
    cdef int32_t *own_starts
    cdef float *widened
    cdef float *slopes
    cdef float *sinks

    cdef int read(self, object q, KvCachePool pool, object layer, object block_tables, object seq_lens,
                  object query_start_loc, object custom_mask) except -1
    cdef int read_starts(self, object query_start_loc) except -1
    cdef int read_mask(self, object custom_mask) except -1
    cdef int read_queries(self) except -1
    cdef int read_scale(self, object sm_scale) except -1
    cdef int read_variant(self, object window_left, object logits_soft_cap, object alibi_slopes,
                          object sinks) except -1
    cdef int read_arithmetic(self, object arithmetic) except -1
    cdef float *read_heads(self, str name, object source) except NULL
    cdef int read_out(self, object out) except -1
    cdef int check_apart(self, str name, const char *data, const Py_ssize_t *shape, const Py_ssize_t *strides,
                         int ndim, Py_ssize_t item) except -1
    cdef long long first_block(self, Py_ssize_t seq) noexcept
    cdef object failure(self, pp_status status)
