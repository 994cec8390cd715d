from cpython.buffer cimport Py_buffer, PyBuffer_Release
from cpython.ref cimport Py_DECREF, PyObject


# The buffer of an object, with its format and strides; `view` points into it, so that it must stay where it is.
cdef struct Buffer:
    Py_buffer view
    Py_ssize_t shape[4]
    Py_ssize_t strides[4]
    PyObject *array  # whose view was filled in here, and who is held; else NULL


cdef int get_buffer(object source, Buffer *buffer) except -1


cdef inline void release_buffer(Buffer *buffer) noexcept:
    if buffer.array != NULL:
        Py_DECREF(<object>buffer.array)
    else:
        PyBuffer_Release(&buffer.view)
