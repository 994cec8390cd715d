from cpython.buffer cimport Py_buffer, PyBuffer_Release
from cpython.ref cimport Py_DECREF, PyObject
from libc.stdint cimport int32_t, int64_t


cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    #define PP_HAS_GIL 0
    #else
    #define PP_HAS_GIL 1
    #endif
    """
    const bint HAS_GIL "PP_HAS_GIL"


# The buffer of an object, with its format and strides. Must not be moved, because `view` points into it.
cdef struct Buffer:
    Py_buffer view
    Py_ssize_t shape[4]
    Py_ssize_t strides[4]
    PyObject *array  # the object to release if this module filled in `view`; NULL if the buffer protocol did


# Holds the memory of an array, by the buffer protocol or DLPack, until `release_buffer`. False for an object that has
# neither. Raises the exceptions of both; ValueError, with `name`, for a tensor of more than 4 dimensions, a tensor
# outside of CPU memory, and a tensor of torch that is negated lazily.
# The format of bfloat16 is "E". The format may be empty for a dtype that no function accepts.
cdef bint get_buffer(object source, Buffer *buffer, str name=*) except -1
cdef object dtype_of(object source)


cdef inline void release_buffer(Buffer *buffer) noexcept:
    if buffer.array != NULL:
        Py_DECREF(<object>buffer.array)
    else:
        PyBuffer_Release(&buffer.view)


# New arrays, not cleared: of one dimension, and (rows, heads, dims). `data` is where their elements begin.
cdef object new_int32(Py_ssize_t n, int32_t **data)
cdef object new_int64(Py_ssize_t n, int64_t **data)
cdef object new_float32(Py_ssize_t rows, Py_ssize_t heads, Py_ssize_t dims, float **data)


cdef struct IdArray:
    int32_t *ids
    Py_ssize_t count
    Buffer buffer
    bint has_buffer
    int32_t *heap
    int32_t room[64]


# 4 or 8 for int32 or int64, else 0.
cdef Py_ssize_t int_bytes(const Py_buffer *view) noexcept
# A pp_dtype or TENSOR_BITS16, else -1.
cdef int kind_of_format(const char *format) noexcept
cdef int read_id(object value, int32_t *block) except -1
cdef int64_t read_count(object value) except? -1
# Numbers of tokens. All are read before anything else is checked, since an __index__ may run any code.
cdef list read_counts(object values)
cdef int64_t read_number(str name, object value) except? -1
cdef int read_ids(object blocks, IdArray *array) except -1
# A new list of ids.
cdef list list_ids(const int32_t *ids, Py_ssize_t count)
cdef void release_ids(IdArray *array) noexcept


# An int32 array as a caller gave it, or a copy of one of int64; the last axis is contiguous. Held until `release_ints`.
cdef struct IntArray:
    const int32_t *data
    Py_ssize_t rows
    Py_ssize_t columns      # 1 for one dimension
    int64_t stride          # from one row to the next, in elements
    int32_t *copy           # or NULL
    bint has_buffer
    Buffer buffer


cdef int read_ints(str name, object source, int ndim, IntArray *array) except -1
cdef void release_ints(IntArray *array) noexcept


# A float tensor as a caller gave it. Held until `release_tensor`.
cdef struct Tensor:
    char *data
    int kind  # a pp_dtype, or TENSOR_BITS16
    int ndim
    Py_ssize_t shape[4]
    Py_ssize_t strides[4]  # in bytes
    Py_ssize_t item_bytes
    bint has_buffer
    Buffer buffer


cdef enum:
    TENSOR_BITS16 = 16  # uint16: the bits of a 16-bit float, for bfloat16


cdef int read_tensor(str name, object source, Tensor *tensor) except -1
cdef void release_tensor(Tensor *tensor) noexcept
