from cpython.buffer cimport Py_buffer


cdef class PageBuffer:
    cdef unsigned char *base
    # Views, capsules and calls without the GIL that look into the memory; PP_CLOSED when there can be no more.
    cdef Py_ssize_t exports
    cdef Py_ssize_t _shape[1]
    cdef Py_ssize_t _strides[1]
    cdef Py_ssize_t _num_bytes
    cdef size_t _mapped
    cdef char _format[2]
    cdef object __weakref__

    cdef Py_ssize_t count(self) noexcept
    cdef Py_ssize_t item_bytes(self) noexcept
    cdef int fill_view(self, Py_buffer *view, int flags) except -1
    # One export more, unless the memory is closed; one less. On any thread.
    cdef bint c_export(self) noexcept nogil
    cdef void c_return(self) noexcept nogil
    # No more exports from here on: False when it was closed before. Raises BufferError while anyone looks into it.
    cdef bint end_exports(self) except -1
    cdef void give_back(self) noexcept
    # Gives whole granules back to the system; returns the bytes that went, 0 when it refuses. They are zeros then.
    cdef size_t c_discard(self, size_t offset, size_t num_bytes) noexcept nogil
    cdef size_t c_granule(self) noexcept nogil
