from libc.stdint cimport int32_t, int64_t

from pagepool.memory.held_blocks cimport HeldBlocks
from pagepool.prefix.event_log cimport Event, EventLog
from pagepool.prefix.summary cimport CacheSummary


cdef class PrefixCache(CacheSummary):
    cdef EventLog log(self)
    cdef tuple match(self, tokens, cache_salt, extra_keys, bint in_part, HeldBlocks held)

    # One of `drain_events`, without the GIL, while no other thread is in a call of the cache: see EventLog.c_next.
    # Returns 0 also when the cache notes none.
    cdef int64_t c_next_event(self, Event *event, int32_t *tokens) noexcept nogil
