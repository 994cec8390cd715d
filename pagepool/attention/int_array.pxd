from libc.stdint cimport int32_t, int64_t

from pagepool.memory.buffers cimport Buffer


# An int32 array as a caller gave it; the last axis is contiguous. Held until `release_ints`.
cdef struct IntArray:
    const int32_t *data
    Py_ssize_t rows
    Py_ssize_t columns      # 1 for one dimension
    int64_t stride          # from one row to the next, in elements
    bint has_buffer
    Buffer buffer


cdef int read_ints(str name, object source, int ndim, IntArray *array) except -1
cdef void release_ints(IntArray *array) noexcept
