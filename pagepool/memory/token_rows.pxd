from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t

from pagepool.csrc cimport pp_dtype, pp_kv_layout
from pagepool.memory.tensor cimport Tensor


# The arguments of an append, read and checked; what they point to is held until the object goes.
cdef class TokenRows:
    cdef const int64_t *slots
    cdef Py_ssize_t num_tokens
    cdef const char *k_data
    cdef const char *v_data
    cdef pp_dtype dtype
    cdef int64_t token_stride  # in elements, of k and of v
    cdef int64_t head_stride

    cdef Tensor k
    cdef Tensor v
    cdef object k_owner
    cdef object v_owner
    cdef Py_buffer slots_view
    cdef bint has_slots
    cdef char *packed

    cdef int read(self, object slot_mapping, object k, object v, const pp_kv_layout *layout) except -1
    cdef int read_slots(self, object slot_mapping) except -1
    cdef int check_rows(self, str name, Tensor *tensor, const pp_kv_layout *layout) except -1
    cdef int pack(self) except -1
