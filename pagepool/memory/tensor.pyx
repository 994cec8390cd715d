"""Float tensors as callers give them: by the buffer protocol, as ml_dtypes arrays, or by DLPack."""

from cpython.buffer cimport Py_buffer, PyObject_CheckBuffer

from pagepool.csrc cimport PP_BF16, PP_F16, PP_F32
from pagepool.memory.buffers cimport get_buffer, release_buffer
from pagepool.memory.dlpack cimport PP_DL_BFLOAT, PP_DL_FLOAT, PP_DL_UINT, import_capsule, pp_dl_tensor

import numpy as np

__all__ = []

cdef int MOST_DIMS = 4  # of Tensor.shape


cdef int kind_of_format(const char *format) noexcept:
    if format[0] == b"@" or format[0] == b"=" or format[0] == b"<":
        format += 1
    if format[0] == 0 or format[1] != 0:
        return -1
    if format[0] == b"f":
        return PP_F32
    if format[0] == b"e":
        return PP_F16
    return TENSOR_BITS16 if format[0] == b"H" else -1


cdef int kind_of_dlpack(const pp_dl_tensor *source) noexcept:
    cdef int code = source.type_code, bits = source.type_bits
    if source.type_lanes != 1:
        return -1
    if code == PP_DL_FLOAT and bits == 32:
        return PP_F32
    if code == PP_DL_FLOAT and bits == 16:
        return PP_F16
    if code == PP_DL_BFLOAT and bits == 16:
        return PP_BF16
    return TENSOR_BITS16 if code == PP_DL_UINT and bits == 16 else -1


cdef int finish(str name, Tensor *tensor) except -1:
    """Checks what no reader of a tensor can do without."""
    if not 0 <= tensor.ndim <= MOST_DIMS:
        raise ValueError(f"{name} must have at most {MOST_DIMS} dimensions, not {tensor.ndim}")
    return 0


cdef bint read_view(str name, object source, Tensor *tensor) except -1:
    """Whether `source` shows a buffer of a known format."""
    cdef const Py_buffer *view = &tensor.buffer.view
    cdef int i
    try:
        get_buffer(source, &tensor.buffer)
    except (BufferError, ValueError):  # NumPy has no format for the dtypes of ml_dtypes
        return False
    tensor.has_buffer = True
    tensor.kind = kind_of_format(view.format)
    if tensor.kind < 0:
        release_tensor(tensor)
        return False
    tensor.data = <char *>view.buf
    tensor.ndim = view.ndim
    tensor.item_bytes = view.itemsize
    finish(name, tensor)
    for i in range(view.ndim):
        tensor.shape[i] = view.shape[i]
        tensor.strides[i] = view.strides[i]
    return True


cdef object read_dlpack(str name, object source, Tensor *tensor):
    cdef pp_dl_tensor *shown = NULL
    cdef Py_ssize_t stride
    cdef int i
    capsule = import_capsule(source, &shown)
    tensor.kind = kind_of_dlpack(shown)
    if tensor.kind < 0:
        raise wrong_dtype(name, getattr(source, "dtype", f"DLPack {shown.type_code}:{shown.type_bits}"))
    tensor.data = <char *>shown.data + shown.byte_offset
    tensor.ndim = shown.ndim
    tensor.item_bytes = stride = shown.type_bits // 8
    finish(name, tensor)
    for i in range(shown.ndim - 1, -1, -1):
        tensor.shape[i] = shown.shape[i]
        tensor.strides[i] = stride if shown.strides == NULL else shown.strides[i] * tensor.item_bytes
        stride *= max(shown.shape[i], 1)
    return capsule


cdef object wrong_dtype(str name, object dtype):
    return TypeError(f"{name} must be float32, float16 or bfloat16 (uint16 bits), not {dtype}")


cdef object read_tensor(str name, object source, Tensor *tensor):
    """Reads `source` into `tensor`; returns an owner to hold until `release_tensor`.

    On an exception there is nothing to release: TypeError for another dtype or no tensor at all, ValueError for more
    than four dimensions or memory that is not the CPU's.
    """
    tensor.has_buffer = False
    try:
        if PyObject_CheckBuffer(source):
            if read_view(name, source, tensor):
                return None
            if not isinstance(source, np.ndarray) or source.dtype.name != "bfloat16":
                raise wrong_dtype(name, getattr(source, "dtype", memoryview(source).format))
            read_view(name, source.view(np.uint16), tensor)
            tensor.kind = PP_BF16
            return None
        if hasattr(source, "__dlpack__"):
            return read_dlpack(name, source, tensor)
    except BaseException:
        release_tensor(tensor)
        raise
    raise TypeError(f"{name} must have the buffer protocol or __dlpack__, {type(source).__name__} has neither")


cdef void release_tensor(Tensor *tensor) noexcept:
    if tensor.has_buffer:
        tensor.has_buffer = False
        release_buffer(&tensor.buffer)
