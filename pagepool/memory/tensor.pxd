from pagepool.memory.buffers cimport Buffer


# A float tensor as a caller gave it. Hold `owner` while it is read, and release it.
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


cdef object read_tensor(str name, object source, Tensor *tensor)
cdef void release_tensor(Tensor *tensor) noexcept
