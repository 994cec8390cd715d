from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.radix_tree cimport Name, NodeTable


cdef enum:
    STORED
    REMOVED
    CLEARED


# As `PrefixEvent`: names are 16 bytes; of CLEARED they are zeros and the block is -1.
cdef struct Event:
    Name name
    Name parent
    int32_t kind
    int32_t block


cdef class EventLog:
    # Event number s, for first <= s < next, is at s % room; next - first <= room. The next event gets the number
    # `next`.
    cdef NodeTable tree
    cdef Event *events
    cdef int32_t *tokens  # block_size of each event
    cdef int64_t room
    cdef int64_t first
    cdef int64_t next

    # Drops the oldest event when the log is full. Cannot fail.
    cdef void c_add(self, int kind, int32_t node, int32_t block) noexcept
    cdef void c_fill(self, Event *event, int32_t *tokens, int32_t node) noexcept
    cdef object made(self, int64_t sequence, const Event *event, const int32_t *tokens)
    cdef list drain(self)
    cdef object snapshot(self)
    cdef object name_snapshot(self)
