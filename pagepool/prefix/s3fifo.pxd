from libc.stdint cimport int64_t

from pagepool.prefix.policy cimport EvictionPolicy


cdef class S3FifoPolicy(EvictionPolicy):
    cdef int64_t max_ghosts
