"""PageBuffer: owns memory. Views hold a reference to it; the memory is freed with the last reference."""

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


cdef extern from *:
    """
    #define PP_CLOSED PY_SSIZE_T_MIN
    #define pp_count_load(count) __atomic_load_n(count, __ATOMIC_ACQUIRE)
    #define pp_count_replace(count, expected, value) \\
        __atomic_compare_exchange_n(count, expected, value, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
    #define pp_count_down(count) __atomic_fetch_sub(count, 1, __ATOMIC_RELEASE)
    """
    const Py_ssize_t PP_CLOSED
    Py_ssize_t pp_count_load(Py_ssize_t *count) nogil
    bint pp_count_replace(Py_ssize_t *count, Py_ssize_t *expected, Py_ssize_t value) nogil
    void pp_count_down(Py_ssize_t *count) nogil


cdef dict ITEM_BYTES = {"f": 4, "i": 4, "e": 2, "H": 2, "B": 1, "Q": 8}


@cython.final
@cython.no_gc
cdef class PageBuffer:
    """Contiguous zeroed elements at a fixed address. Memory is committed at the first touch.

    Internal: pools, tables and their views share it. `format` is a format of the buffer protocol ("f", "e", "H", "i",
    "B" or "Q"). With `huge` the address is a multiple of 2 MiB, and huge pages are requested. Raises `MemoryError` if
    the system has too little memory.

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
            self._shape[0] = 0
            self._num_bytes = 0
            if self.owner is None:
                pp_unreserve(&reservation)
            self.owner = None

    cdef void look_into(self, object owner, unsigned char *base, Py_ssize_t count) noexcept:
        self.give_back()
        self.owner = owner
        self.base = base
        self._shape[0] = count
        self._num_bytes = count * self._strides[0]
        self._mapped = 0

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

    cdef bint c_export(self) noexcept nogil:
        cdef Py_ssize_t count = pp_count_load(&self.exports)
        while count != PP_CLOSED:
            if pp_count_replace(&self.exports, &count, count + 1):
                return True
        return False

    cdef void c_return(self) noexcept nogil:
        pp_count_down(&self.exports)

    cdef bint end_exports(self) except -1:
        cdef Py_ssize_t count = 0
        if pp_count_replace(&self.exports, &count, PP_CLOSED):
            return True
        if count != PP_CLOSED:
            raise BufferError(f"cannot close memory while {count} views of it exist")
        return False

    cdef int fill_view(self, Py_buffer *view, int flags) except -1:
        """Fills in a buffer request, made to this object or to a pool that exports this memory."""
        if not self.c_export():
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
        return 0

    def __getbuffer__(self, Py_buffer *view, int flags):
        self.fill_view(view, flags)

    def __releasebuffer__(self, Py_buffer *view):
        self.c_return()
