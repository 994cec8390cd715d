from pagepool.prefix.policy cimport EvictionPolicy
from pagepool.prefix.terms cimport TermQueue


cdef class PriorityPolicy(EvictionPolicy):
    # Nodes with a term have a block, and a priority above 0.
    cdef int lowest  # no list below it has a node
    cdef TermQueue terms
