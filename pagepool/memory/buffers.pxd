from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.memoryview cimport PyMemoryView_FromObject


# The buffer of an object with its format and strides. ctypes leaves out the strides even where they are asked for, and
# others may leave out the format: a memoryview fills in both.
cdef inline int get_buffer(object source, Py_buffer *view) except -1:
    PyObject_GetBuffer(source, view, PyBUF_FORMAT | PyBUF_STRIDES)
    if view.format != NULL and (view.strides != NULL or view.ndim == 0):
        return 0
    PyBuffer_Release(view)
    PyObject_GetBuffer(PyMemoryView_FromObject(source), view, PyBUF_FORMAT | PyBUF_STRIDES)
    return 0
