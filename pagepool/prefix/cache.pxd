from pagepool.memory.held_blocks cimport HeldBlocks
from pagepool.prefix.event_log cimport EventLog
from pagepool.prefix.summary cimport CacheSummary


cdef class PrefixCache(CacheSummary):
    cdef EventLog log(self)
    cdef tuple match(self, tokens, cache_salt, extra_keys, bint in_part, HeldBlocks held)
