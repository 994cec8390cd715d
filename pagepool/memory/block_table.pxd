from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator, Link
from pagepool.memory.page_buffer cimport PageBuffer


cdef class PagedSeqState:
    #   table[first_block:num_blocks] are the blocks, each with one reference of this sequence's
    #   table[:first_block] == -1: freed before the rest;   table[num_blocks:] == 0
    #   first_block * block_size <= length;   ceil(length / block_size) <= num_blocks <= max_blocks_per_seq
    #   is_closed: length == num_blocks == 0
    cdef Link link
    cdef object _label
    cdef readonly BlockAllocator allocator
    cdef readonly int32_t block_size
    cdef readonly int32_t max_blocks_per_seq
    cdef readonly int32_t first_block
    cdef int32_t num_blocks
    cdef bint is_closed
    cdef int64_t length
    cdef int64_t call  # the number of the last batch call that saw this sequence, to detect one that is given twice
    cdef int64_t pending  # tokens that this call appends to it
    cdef PageBuffer memory
    cdef int32_t *c_blocks  # == memory.base: the table
    cdef object __weakref__

    # All return PP_OK or have changed nothing. PP_INVALID_ARGUMENT: a number is below 0, a length is above the present
    # one or within freed blocks, or the sequence is closed.

    # PP_OVER_MAXIMUM, PP_EXHAUSTED.
    cdef pp_status c_ensure_capacity(self, int64_t target_len) noexcept nogil
    # PP_OVER_MAXIMUM, PP_EXHAUSTED, PP_NO_MEMORY; slots_out is NULL or takes n slots.
    cdef pp_status c_append(self, int64_t n, int64_t *slots_out) noexcept nogil
    # PP_INVALID_BLOCK if another owner freed a block. The next three functions also return it.
    cdef pp_status c_truncate(self, int64_t new_len) noexcept nogil
    # Frees the blocks that hold only tokens before `position`.
    cdef pp_status c_drop_before(self, int64_t position) noexcept nogil
    cdef pp_status c_release(self) noexcept nogil
    cdef pp_status c_close(self) noexcept nogil

    # An empty sequence gets num_tokens tokens in n blocks, exactly as many as they need, and shares the blocks.
    # PP_OVER_MAXIMUM; PP_INVALID_BLOCK for a block that is free, out of range, or has all the references it can have.
    cdef pp_status c_adopt(self, const int32_t *blocks, Py_ssize_t n, int64_t num_tokens) noexcept nogil

    # Upper bound of the blocks that appending n tokens takes: new ones, and one for each shared block that is written.
    # Below 0 if n is below 0, the maximum would be exceeded or the sequence is closed.
    cdef int64_t c_blocks_to_append(self, int64_t n) noexcept nogil
    # Appends n tokens with the blocks `taken`; returns how many blocks it used. Cannot fail.
    cdef int64_t c_append_taken(self, int64_t n, const int32_t *taken) noexcept nogil
    cdef void c_slots(self, int64_t first, int64_t n, int64_t *slots_out) noexcept nogil
    # The status that c_truncate(new_len) would return now; changes nothing.
    cdef pp_status c_may_truncate(self, int64_t new_len) noexcept nogil
    # Whether new_len is at most the length and not within freed blocks.
    cdef bint c_can_keep(self, int64_t new_len) noexcept nogil
    # Blocks that hold `length` tokens.
    cdef inline int64_t c_needed(self, int64_t length) noexcept nogil:
        return length // self.block_size + (length % self.block_size != 0)

    cdef void c_forget(self, int32_t keep) noexcept nogil
    cdef object failed(self, pp_status status, object number, object wanted)
