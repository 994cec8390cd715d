from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.radix_tree cimport NamedBlock, NameSource


cdef enum:
    STORED
    REMOVED
    CLEARED


# As `PrefixEvent`: names are 16 bytes; of CLEARED they are zeros and the block is -1.
cdef struct Event:
    NamedBlock named
    int32_t kind


cdef class EventLog:
    # Event number s, for first <= s < next, is at s % room; next - first <= room. The next event gets the number
    # `next`.
    cdef NameSource source
    cdef readonly int number  # of the secret of the source
    cdef Event *events
    cdef int32_t *tokens  # block_size of each event
    cdef int64_t room
    cdef int64_t first
    cdef int64_t next

    # Drops the oldest event when the log is full. Cannot fail.
    cdef void c_add(self, int kind, const NamedBlock *named, const int32_t *tokens) noexcept nogil
    # Notes that all blocks were removed.
    cdef void c_clear(self) noexcept nogil
    cdef object made(self, int64_t sequence, int kind, const NamedBlock *named, const int32_t *tokens)
    cdef list drain(self)
    cdef object snapshot(self, bint only_names)
