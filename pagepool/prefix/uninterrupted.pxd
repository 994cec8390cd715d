cdef class Uninterrupted:
    # While one lives, the collector does not run. As long as its owner calls nothing that runs Python code, no other
    # thread does either.
    cdef bint collects
