from libc.stdint cimport int32_t, int64_t

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.block_table cimport PagedSeqState


cdef class BlockTables:
    #   slots[query_starts[i]:query_starts[i + 1]] are the slots of the tokens of row i
    #   row i of tables is zero from filled[i] on
    cdef readonly int32_t max_seqs
    cdef readonly int32_t max_blocks_per_seq
    cdef readonly BlockAllocator allocator  # of the blocks in the rows; None when no row is filled
    cdef int32_t[:, ::1] tables
    cdef int32_t[::1] lens
    cdef int32_t[::1] query_starts
    cdef int64_t[::1] slots
    cdef int32_t[::1] filled
    cdef int32_t[::1] counts  # tokens of the step, per row of the batch that is being filled
    cdef Py_ssize_t num_seqs
    cdef object _tables
    cdef object _lens
    cdef object _query_starts
    cdef object _slots
    cdef object __weakref__

    cdef void c_fill_row(self, Py_ssize_t row, PagedSeqState state, int64_t num_tokens) noexcept nogil
    cdef int reserve_slots(self, int64_t count) except -1
