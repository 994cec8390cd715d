from pagepool.prefix.policy cimport EvictionPolicy


cdef class LruPolicy(EvictionPolicy):
    pass
