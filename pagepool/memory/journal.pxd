cdef class Journal:
    # steps: pairs of a time and a function, the times rising; None once it has ended.
    cdef readonly bint is_open
    cdef list steps


cdef class Participation:
    cdef readonly object participant
    cdef bint begun


cdef class Made:
    cdef readonly object thing
