from pagepool.prefix.policy cimport EvictionPolicy


cdef class PriorityPolicy(EvictionPolicy):
    cdef int lowest  # no list below it has a node
