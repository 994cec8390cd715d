# cython: freethreading_compatible=True
"""Access to pagepool.memory.arrays for the tests in this folder."""

from pagepool.memory.arrays cimport Buffer, get_buffer, release_buffer


cdef class Halves:
    """A bfloat16 array with DLPack. It also has the buffer protocol, which fails: the protocol has no bfloat16."""

    cdef object tensor

    def __init__(self, tensor):
        self.tensor = tensor

    def __getbuffer__(self, Py_buffer *view, int flags):
        raise BufferError("the buffer protocol has no bfloat16")

    def __releasebuffer__(self, Py_buffer *view):
        pass

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


def describe(source):
    """Return whether the array was read directly, without the buffer protocol, and the fields of its buffer."""
    cdef Buffer buffer
    cdef int i
    get_buffer(source, &buffer)
    try:
        return buffer.array != NULL, {
            "at": <size_t>buffer.view.buf,
            "shape": [buffer.view.shape[i] for i in range(buffer.view.ndim)],
            "strides": [buffer.view.strides[i] for i in range(buffer.view.ndim)],
            "format": bytes(buffer.view.format),
            "itemsize": buffer.view.itemsize,
            "len": buffer.view.len,
            "readonly": bool(buffer.view.readonly),
        }
    finally:
        release_buffer(&buffer)
