"""PageBuffer: the owner of memory. Whoever looks into it holds it; the memory goes when the last holder goes."""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, Py_buffer

from pagepool.csrc cimport PP_OK, pp_status

__all__ = ["PageBuffer"]


cdef extern from "reserve.h" nogil:
    ctypedef struct pp_reservation:
        unsigned char *base
        size_t bytes
        size_t mapped

    pp_status pp_reserve(pp_reservation *reservation, size_t bytes, int huge)
    void pp_unreserve(pp_reservation *reservation)
    size_t pp_discard(unsigned char *start, size_t bytes)
    size_t pp_granule(const pp_reservation *reservation)


cdef dict ITEM_BYTES = {"f": 4, "i": 4, "e": 2, "H": 2, "B": 1}


@cython.final
@cython.no_gc
cdef class PageBuffer:
    """Zeroed elements in one piece whose address never changes, committed when they are touched.

    Internal: pools, tables and their views share it. `format` is that of the buffer protocol ("f", "e", "H", "i" or
    "B"). With `huge` the address is a multiple of 2 MiB and huge pages are asked for. Raises `MemoryError` when the
    system has no room.

    >>> memoryview(PageBuffer(3, "i")).tolist()
    [0, 0, 0]
    """

    def __cinit__(self, Py_ssize_t count, str format, bint huge=False):
        cdef Py_ssize_t item_bytes = ITEM_BYTES[format]
        cdef pp_reservation reservation
        if count < 0:
            raise ValueError(f"a buffer cannot have {count} elements")
        if count > <Py_ssize_t>(<size_t>-1 >> 1) // item_bytes or pp_reserve(
            &reservation, count * item_bytes, huge
        ) != PP_OK:
            raise MemoryError(f"the system has no room for {count} elements of {item_bytes} bytes")
        self.base = reservation.base
        self._mapped = reservation.mapped
        self._num_bytes = count * item_bytes
        self._shape[0] = count
        self._strides[0] = item_bytes
        self._format[0] = ord(format)

    def __dealloc__(self):
        self.give_back()

    cdef void give_back(self) noexcept:
        cdef pp_reservation reservation
        if self.base != NULL:
            reservation.base = self.base
            reservation.bytes = self._num_bytes
            reservation.mapped = self._mapped
            self.base = NULL
            pp_unreserve(&reservation)

    cdef size_t c_discard(self, size_t offset, size_t num_bytes) noexcept nogil:
        return pp_discard(self.base + offset, num_bytes) if self._mapped else 0

    cdef size_t c_granule(self) noexcept nogil:
        cdef pp_reservation reservation
        reservation.mapped = self._mapped
        return pp_granule(&reservation)

    cdef Py_ssize_t count(self) noexcept:
        return self._shape[0]

    cdef Py_ssize_t item_bytes(self) noexcept:
        return self._strides[0]

    cdef int close(self) except -1:
        """Gives the memory back now. Raises BufferError while anyone looks into it."""
        if self.exports:
            raise BufferError(f"cannot close memory that {self.exports} views look into")
        self._shape[0] = 0
        self._num_bytes = 0
        self.give_back()
        return 0

    cdef int fill_view(self, Py_buffer *view, int flags) except -1:
        """Answers a request for a buffer, this object's or that of one that shows it as its own."""
        if self.base == NULL:
            raise BufferError("the memory is closed")
        view.buf = self.base
        view.obj = self
        view.len = self._num_bytes
        view.readonly = 0
        view.itemsize = self._strides[0]
        view.format = self._format if flags & PyBUF_FORMAT else NULL
        view.ndim = 1
        view.shape = self._shape if flags & PyBUF_ND else NULL
        view.strides = self._strides if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL
        self.exports += 1
        return 0

    def __getbuffer__(self, Py_buffer *view, int flags):
        self.fill_view(view, flags)

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1
