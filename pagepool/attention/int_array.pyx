"""int32 arrays of one or two dimensions as callers give them: block tables and lengths, read in place."""

from cpython.buffer cimport Py_buffer, PyObject_CheckBuffer
from libc.stdint cimport int32_t

from pagepool.memory.buffers cimport get_buffer, release_buffer
from pagepool.memory.ids cimport has_format

__all__ = []


cdef bint is_int32(const Py_buffer *view) noexcept:
    return view.format != NULL and view.itemsize == sizeof(int32_t) and has_format(view.format, b"il")


cdef int read_ints(str name, object source, int ndim, IntArray *array) except -1:
    """Reads `source` into `array`. TypeError for anything but int32; ValueError for other dimensions or strides."""
    cdef const Py_buffer *view = &array.buffer.view
    array.has_buffer = False
    if not PyObject_CheckBuffer(source):
        raise TypeError(f"{name} must be an int32 array, not {type(source).__name__}")
    get_buffer(source, &array.buffer)
    array.has_buffer = True
    try:
        if not is_int32(view):
            raise TypeError(f"{name} must be int32, not {getattr(source, 'dtype', memoryview(source).format)}")
        if view.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimension{'s' if ndim > 1 else ''}, not {view.ndim}")
        array.data = <const int32_t *>view.buf
        array.rows = view.shape[0]
        array.columns = view.shape[1] if ndim == 2 else 1
        array.stride = view.strides[0] // <Py_ssize_t>sizeof(int32_t)
        if view.shape[ndim - 1] > 1 and view.strides[ndim - 1] != sizeof(int32_t):
            raise ValueError(
                f"the last axis of {name} must be contiguous: {sizeof(int32_t)} bytes a step, not "
                f"{view.strides[ndim - 1]}"
            )
        if view.strides[0] % <Py_ssize_t>sizeof(int32_t) or <size_t>view.buf % sizeof(int32_t):
            raise ValueError(f"{name} must be aligned to {sizeof(int32_t)} bytes")
    except BaseException:
        release_ints(array)
        raise
    return 0


cdef void release_ints(IntArray *array) noexcept:
    if array.has_buffer:
        array.has_buffer = False
        release_buffer(&array.buffer)
