from pagepool.prefix.event_log cimport EventLog
from pagepool.prefix.summary cimport CacheSummary


cdef class PrefixCache(CacheSummary):
    cdef EventLog log(self)
    cdef object match(self, tokens, cache_salt, extra_keys, bint in_part)
