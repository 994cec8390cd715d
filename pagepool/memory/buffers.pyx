"""Buffers of arrays as callers give them.

Plain NumPy arrays of a few dtypes are read where they lie: their buffer protocol writes down shape and format anew each
time, 65 ns for each of the four arrays of a call of `decode`, of 720 ns in all.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.ref cimport Py_INCREF, PyObject

import numpy as np

__all__ = []

cdef extern from *:
    """
    /* What a NumPy array begins with: its C ABI, compiled into every extension that reads arrays, so that it stays. */
    typedef struct {
        PyObject_HEAD
        char *data;
        int ndim;
        Py_ssize_t *shape, *strides;
        PyObject *base, *dtype;
        int flags;
    } pp_numpy_array;
    """
    ctypedef struct pp_numpy_array:
        char *data
        int ndim
        Py_ssize_t *shape
        Py_ssize_t *strides
        PyObject *dtype
        int flags
    PyObject *type_of "(PyObject *)Py_TYPE"(object source) noexcept

cdef enum:
    IS_C_CONTIGUOUS = 0x1
    IS_WRITABLE = 0x400
    MOST_DIMS = 4  # of Buffer.shape
    NUM_PLAIN = 5

# Each dtype's one object for this machine's byte order; an array that has another one is read by the buffer protocol.
cdef tuple PLAIN = (np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float16),
                    np.dtype(np.uint16))
cdef PyObject *dtypes[NUM_PLAIN]
cdef const char *formats[NUM_PLAIN]
cdef Py_ssize_t sizes[NUM_PLAIN]
cdef PyObject *array_type = NULL  # NULL: none is read where it lies


cdef bint is_laid_out_so(object array) except -1:
    """Whether pp_numpy_array shows what a plain array says of itself."""
    cdef const pp_numpy_array *plain = <const pp_numpy_array *><PyObject *>array
    shows = plain.ndim == array.ndim and <size_t>plain.data == array.__array_interface__["data"][0]
    shows = shows and plain.dtype == <PyObject *>array.dtype and plain.flags == array.flags.num
    return shows and all(plain.shape[i] == array.shape[i] and plain.strides[i] == array.strides[i]
                         for i in range(array.ndim))


cdef int find_plain() except -1:
    global array_type
    cdef int i
    for i in range(NUM_PLAIN):
        dtypes[i] = <PyObject *>PLAIN[i]
        sizes[i] = PLAIN[i].itemsize
    formats[:] = [b"f", b"i", b"q", b"e", b"H"]
    if is_laid_out_so(np.zeros((3, 4, 5), np.float32)[::2, :, 1:3]) and is_laid_out_so(np.zeros(2, np.int64)):
        array_type = <PyObject *>np.ndarray
    return 0


find_plain()


cdef bint read_plain(object source, Buffer *buffer) noexcept:
    """Fills in the buffer of a plain array as NumPy does. Whether it is one of those dtypes."""
    cdef const pp_numpy_array *array = <const pp_numpy_array *><PyObject *>source
    cdef Py_buffer *view = &buffer.view
    cdef Py_ssize_t step
    cdef int kind = 0, i
    while kind < NUM_PLAIN and array.dtype != dtypes[kind]:
        kind += 1
    if kind == NUM_PLAIN or array.ndim > MOST_DIMS:
        return False
    view.buf = array.data
    view.ndim = array.ndim
    view.itemsize = step = sizes[kind]
    view.format = <char *>formats[kind]
    view.readonly = not array.flags & IS_WRITABLE or array.flags < 0  # the sign: writing warns
    view.shape = buffer.shape
    view.strides = buffer.strides
    view.suboffsets = NULL
    view.internal = NULL
    for i in range(array.ndim - 1, -1, -1):  # strides of a contiguous array may be any where an axis is of length 1
        buffer.shape[i] = array.shape[i]
        buffer.strides[i] = step if array.flags & IS_C_CONTIGUOUS else array.strides[i]
        step *= array.shape[i]
    view.len = step
    Py_INCREF(source)
    buffer.array = <PyObject *>source
    return True


cdef int get_buffer(object source, Buffer *buffer) except -1:
    """Holds the buffer of `source` until `release_buffer`; raises what its buffer protocol does."""
    cdef Py_buffer *view = &buffer.view
    if type_of(source) == array_type and read_plain(source, buffer):
        return 0
    buffer.array = NULL
    PyObject_GetBuffer(source, view, PyBUF_FORMAT | PyBUF_STRIDES)
    # ctypes leaves out the strides even where they are asked for, and others may leave out the format: a memoryview
    # fills in both.
    if view.format != NULL and (view.strides != NULL or view.ndim == 0):
        return 0
    PyBuffer_Release(view)
    PyObject_GetBuffer(PyMemoryView_FromObject(source), view, PyBUF_FORMAT | PyBUF_STRIDES)
    return 0
