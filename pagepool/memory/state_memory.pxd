from libc.stdint cimport int32_t, int64_t

from pagepool.memory.page_buffer cimport PageBuffer


cdef class StateMemory:
    #   state s of row i is at buffer.base + starts[s] + i * row_bytes[s], starts[s] a multiple of 64
    cdef readonly int32_t capacity
    cdef PageBuffer buffer
    cdef int64_t[::1] starts
    cdef int64_t[::1] row_bytes
    cdef list views

    # Zeros every state of a row, which must be in range.
    cdef void c_zero(self, int32_t row) noexcept nogil
    # Copies every state of row src to row dst; both must be in range.
    cdef void c_copy(self, int32_t dst, int32_t src) noexcept nogil
    cdef int64_t c_row_bytes(self) noexcept nogil
