from cpython.buffer cimport Py_buffer


cdef class PageBuffer:
    cdef unsigned char *base
    # Number of views, capsules and calls without the GIL that use the memory; PP_CLOSED after `close`.
    cdef Py_ssize_t exports
    cdef Py_ssize_t _shape[1]
    cdef Py_ssize_t _strides[1]
    cdef Py_ssize_t _num_bytes
    cdef size_t _mapped
    cdef char _format[2]
    cdef object owner  # of the memory, or None: then it is this object
    cdef object __weakref__

    cdef Py_ssize_t count(self) noexcept
    cdef Py_ssize_t item_bytes(self) noexcept
    cdef int fill_view(self, Py_buffer *view, int flags) except -1
    # Count an export (false if the memory is closed), and remove one. On any thread.
    cdef bint c_export(self) noexcept nogil
    cdef void c_return(self) noexcept nogil
    # Forbids exports from now on. Returns false if it was closed before. Raises BufferError while exports exist.
    cdef bint end_exports(self) except -1
    cdef void give_back(self) noexcept
    # Shows memory of `owner` from now on, and frees its own.
    cdef void look_into(self, object owner, unsigned char *base, Py_ssize_t count) noexcept
    # Returns whole granules to the system, which reads them as zeros from then on. Returns the number of bytes, 0 if
    # the system refuses.
    cdef size_t c_discard(self, size_t offset, size_t num_bytes) noexcept nogil
    cdef size_t c_granule(self) noexcept nogil
