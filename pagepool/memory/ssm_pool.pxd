from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator
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


cdef class SsmStatePool:
    cdef BlockAllocator ids
    cdef StateMemory memory  # None when the states are Python objects
    cdef list slots  # lists of slots, None where none was made yet
    cdef unsigned char[::1] dirty  # for each slot: it was released without zeroing
    cdef object __weakref__

    # For engines without the GIL, on a pool made by from_layout. They do not change positions and request ids of slots.
    # PP_EXHAUSTED.
    cdef pp_status c_alloc(self, int32_t *slot) noexcept nogil
    # Zeroes; PP_INVALID_SLOT when the slot is out of range or free, PP_INVALID_ARGUMENT without a layout.
    cdef pp_status c_release(self, int32_t slot) noexcept nogil

    # Copies the states of one slot in use to another; PP_INVALID_SLOT, PP_INVALID_ARGUMENT as c_release.
    cdef pp_status c_copy(self, int32_t dst, int32_t src) noexcept nogil

    # As c_alloc. Without zero the states may be those of an earlier request.
    cdef pp_status c_take(self, int32_t *slot, bint zero) noexcept nogil
    cdef object slot_at(self, int32_t i)
    cdef int32_t read_slot(self, object i) except -1
    cdef int32_t read_used(self, object i) except -1
