from libc.stdint cimport int32_t, int64_t, uint8_t


# The mask of each query token of a batch, in the format of pp_decode_args, and copies of the counts that it was checked
# with.
cdef class MaskBits:
    cdef const uint8_t *bits
    cdef Py_ssize_t num_bytes    # size of `bits`, which are the caller's memory if it gave packed bits
    cdef int64_t *indptr         # (num_seqs,)
    cdef int32_t *widths         # (num_seqs,)
    cdef int32_t *seq_lens       # (num_seqs,)
    cdef int32_t *query_starts   # (num_seqs + 1,)
    cdef uint8_t *packed
    cdef Py_ssize_t num_seqs
    cdef object owner

    cdef int read(self, object mask, const int32_t *query_starts, const int32_t *seq_lens,
                  Py_ssize_t num_seqs) except -1
    cdef int copy_counts(self, const int32_t *query_starts, const int32_t *seq_lens) except -1
    cdef int32_t queries(self, Py_ssize_t seq) noexcept
    cdef int pack(self, list masks) except -1
    cdef int take_packed(self, object array) except -1
