# cython: freethreading_compatible=True
"""What pagepool.memory.arrays makes of an array, for the tests beside it."""

from pagepool.memory.arrays cimport Buffer, get_buffer, release_buffer


def describe(source):
    """Whether it was read where it lies, and the buffer as it was shown."""
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
